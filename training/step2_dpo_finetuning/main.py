"""Step 2, without a reward model: preference optimisation of a causal language model (DPO and its relatives)."""

from dschat.arguments import PreferenceSettings
from dschat.arguments.command_line import as_settings_errors, exit_with_help, parse

if __name__ == "__main__":
    exit_with_help(PreferenceSettings, __doc__)  # before the imports below, which take seconds

from functools import partial

from dschat.data.mismatched import with_mismatched
from dschat.distributed import launch
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer
from dschat.preference.objective import RESPONSE_LOGPROBS, preference_objective
from dschat.preference.reference_logprobs import with_reference_logprobs
from dschat.runs import signals
from dschat.runs.best_model import check_evaluation_rows
from dschat.runs.exporting import export_run
from dschat.runs.fit import fit
from dschat.runs.network_loading import load_network
from dschat.runs.next_commands import print_next_commands
from dschat.runs.output_conflicts import overwritten_models
from dschat.runs.set_up import data_options, load_splits, start
from dschat.runs.validation import model_problems, one_model_problems, vocabulary_problems


def check(settings: PreferenceSettings) -> list[str]:
    """Problems with the settings: model, data, a reference model that is trained or has another vocabulary."""
    model, preference, data = settings.model, settings.preference, settings.data
    problems = one_model_problems(preference.kind, settings)
    trains_base_weights = not (model.lora_dim and settings.lora.only_optimize_lora)
    if preference.reference == "adapters_off" and not preference.reference_free and trains_base_weights:
        problems.append(
            "--reference adapters_off: the weights of the base model must not be trained: add --only_optimize_lora "
            "and a rank --lora_dim, or use --reference precompute"
        )
    if reference := preference.ref_model_name_or_path:
        problems += model_problems(
            "--ref_model_name_or_path", reference, tokens=model.max_seq_len,
            lengths=f"--max_seq_len {model.max_seq_len}", add_eot_token=data.add_eot_token,
            trust_remote_code=model.trust_remote_code, causal=True,
        )  # fmt: skip
        if not problems:
            problems += vocabulary_problems(
                "--ref_model_name_or_path", reference, trained=model.model_name_or_path,
                add_eot_token=data.add_eot_token, trust_remote_code=model.trust_remote_code,
            )  # fmt: skip
        problems += overwritten_models(settings.run.output_dir, [("--ref_model_name_or_path", reference)])
    return problems


def warn(settings: PreferenceSettings) -> list[str]:
    """Settings that are valid but probably not intended."""
    preference, warnings = settings.preference, []
    if preference.preference_loss == "simpo" and preference.beta < 1:
        warnings.append(
            f"--beta {preference.beta} with --preference_loss simpo, which multiplies mean log-probs by it: 2 to 10 "
            "is usual"
        )
    if preference.preference_loss == "robust" and not preference.label_smoothing:
        warnings.append("--preference_loss robust without --label_smoothing is --preference_loss dpo")
    return warnings


def main() -> None:
    # Set up
    settings = parse(PreferenceSettings, description=__doc__, check=check, warn=warn)
    model, preference, data, run = settings.model, settings.preference, settings.data, settings.run
    start(run, settings.devices)
    tokenizer = load_tokenizer(
        model.model_name_or_path, add_eot_token=data.add_eot_token, trust_remote_code=model.trust_remote_code
    )
    options = data_options(data, run, max_tokens=model.max_seq_len, phase=2)
    splits = load_splits(preference.kind, tokenizer, options)
    with as_settings_errors():
        check_evaluation_rows(run, len(splits.eval))
    objective = preference_objective(preference, pad_token_id=tokenizer.pad_token_id)
    load = partial(
        load_network, load_model=load_causal_lm, wrapper=TokenLogprobs, settings=settings, tokenizer=tokenizer
    )
    if preference.kind == "unpaired":
        with as_settings_errors():
            splits = with_mismatched(splits, max_tokens=model.max_seq_len)
    if preference.reference == "precompute" and not preference.reference_free:
        path = preference.ref_model_name_or_path or model.model_name_or_path
        splits = with_reference_logprobs(
            splits, objective, response_logprobs=RESPONSE_LOGPROBS[preference.kind],
            load=partial(load, path=path, frozen=True), path=path,
            folder=options.output_path, settings=settings,
        )  # fmt: skip

    with signals.capture_signals() as signal_flag:
        # Fit and evaluate
        engine = fit(
            "step2_dpo_finetuning", splits, objective, load=load, settings=settings, tokenizer=tokenizer,
            signal_flag=signal_flag,
        )  # fmt: skip

        # Export
        export_run(
            {"": engine.module.model}, run.output_dir, tokenizer, signal_flag=signal_flag, lora=settings.lora,
            bases={"": settings.model.model_name_or_path},
        )  # fmt: skip
        print_next_commands("dpo", run.output_dir, [""])


if __name__ == "__main__":
    launch.run(main)
