"""API pages: which modules they show. mkdocstrings reads their docstrings without importing them."""

from __future__ import annotations

from pathlib import Path

# Page → title, module → members (empty: all public ones).
API = {
    "losses": ("dschat.losses", {
        "dschat.losses.normalizer": (), "dschat.losses.sft": (), "dschat.losses.reward_model": (),
        "dschat.losses.preference": (), "dschat.losses.kto": (), "dschat.losses.policy": (),
        "dschat.losses.policy_table": ("PolicyLoss",),
        "dschat.losses.aggregation": (), "dschat.losses.value": (), "dschat.losses.regularization": (),
    }),
    "advantages": ("dschat.rlhf.advantages", {
        "dschat.rlhf.advantages": (), "dschat.rlhf.group_advantages": (),
    }),
    "algorithms": ("dschat.rlhf.algorithms", {"dschat.rlhf.algorithms": ()}),
    "rewards": ("dschat.rewards", {
        "dschat.rewards.rules": (), "dschat.rewards.answer_extraction": (), "dschat.rewards.function_arguments": (),
        "dschat.rewards.response_batch": (),
    }),
    "generation": ("dschat.generation", {
        "dschat.generation.rollout_engine": (), "dschat.generation.request": ("Request",),
        "dschat.generation.rollout": ("Rollout",), "dschat.generation.sampling": ("SamplingParams",),
    }),
    "tensors": ("dschat.tensors", {"dschat.tensors": ()}),
}  # fmt: skip


def write_api_pages(folder: Path) -> None:
    """Write api/NAME.md of every entry into docs_dir."""
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, (title, modules) in API.items():
        blocks = "\n".join(_block(module, members) for module, members in modules.items())
        (folder / "api" / f"{name}.md").write_text(f"# {title}\n\n{blocks}", encoding="utf-8")


def _block(module: str, members: tuple[str, ...]) -> str:
    listed = f"    options:\n        members: [{', '.join(members)}]\n" if members else ""
    return f"::: {module}\n{listed}"
