from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from tiny_models import CONFIGS, VOCABULARY, left_and_right_padded, tiny_causal_lm, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dschat.generation import HybridEngine
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer, verify_head
from dschat.models.loading import set_dropout
from dschat.models.lora import add_lora
from dschat.models.tokenizer import id_limit
from dschat.models.weights import export_model


@pytest.fixture
def folder(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def logprobs_by_own_logits(model, tokens, temperature=1.0):
    """Log-probs and entropies of an unpadded row from the model's own logits: [S-1], [S-1]."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / temperature
    every = F.log_softmax(logits, dim=-1)
    return every[torch.arange(len(tokens) - 1), tokens[1:]], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_gradients_equal_the_models_own_logits_under_either_padding(name):
    model = tiny_causal_lm(name)
    tokens, mask = left_and_right_padded()
    loss_mask = mask.clone()
    loss_mask[2, 3:5] = False  # a gap inside the response
    weights = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))

    logprobs, entropy = TokenLogprobs(model)(tokens, mask, loss_mask, temperature=0.7, with_entropy=True)
    (logprobs * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model.zero_grad(set_to_none=True)
    expected, expected_entropy = torch.zeros(3, 10).double(), torch.zeros(3, 10).double()
    for row in range(3):
        real = mask[row].nonzero().squeeze(1)
        expected[row, real[1:]], expected_entropy[row, real[1:]] = logprobs_by_own_logits(model, tokens[row, real], 0.7)
    predicted = loss_mask.clone()
    predicted[0, 4] = predicted[1, 0] = predicted[2, 0] = False  # first real tokens have no prediction
    expected, expected_entropy = expected * predicted, expected_entropy * predicted
    (expected * weights).sum().backward()

    torch.testing.assert_close(logprobs, expected.float(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=2e-5, rtol=1e-4)
    assert (logprobs == 0).equal(~predicted)
    expected_gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected_gradients.keys()
    for parameter in expected_gradients:
        torch.testing.assert_close(gradients[parameter], expected_gradients[parameter], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma2"])
def test_a_row_does_not_depend_on_the_ids_of_its_padding_or_on_other_rows(name):
    model = TokenLogprobs(tiny_causal_lm(name)).eval()
    tokens, mask = left_and_right_padded()
    batched = model(tokens, mask, mask)
    other_padding = torch.where(mask, tokens, (tokens + 11) % VOCABULARY)
    torch.testing.assert_close(model(other_padding, mask, mask)[mask], batched[mask])
    torch.testing.assert_close(model(tokens[:1], mask[:1], mask[:1])[0, 5:], batched[0, 5:])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_rank_without_tokens_gives_every_parameter_a_zero_gradient(with_entropy):
    model = TokenLogprobs(tiny_causal_lm("llama"))
    tokens, mask = left_and_right_padded()
    output = model(tokens, mask, torch.zeros_like(mask), with_entropy=with_entropy)
    sum(part.sum() for part in (output if with_entropy else [output])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_the_head_adds_no_parameter_and_no_name_to_the_state_dict():
    model = tiny_causal_lm("phi")
    wrapped = TokenLogprobs(model)
    assert {id(p) for p in wrapped.parameters()} == {id(p) for p in model.parameters()}
    assert wrapped.state_dict().keys() == {f"model.{name}" for name in model.state_dict()}
    other = TokenLogprobs(tiny_causal_lm("phi", seed=1))
    other.load_state_dict(wrapped.state_dict())
    assert other.head.weight.equal(model.lm_head.weight) and other.head.bias.equal(model.lm_head.bias)


def test_the_head_follows_the_model_to_another_dtype():
    wrapped = TokenLogprobs(tiny_causal_lm("llama-tied")).to(torch.bfloat16)
    assert wrapped.head.weight is wrapped.model.lm_head.weight is wrapped.model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_verify_head_accepts_every_architecture(name, dtype):
    model = tiny_causal_lm(name).to(dtype)
    verify_head(model)
    assert model.training


def test_verify_head_refuses_an_architecture_whose_logits_it_cannot_reproduce():
    model = tiny_causal_lm("granite")
    original = model.forward

    def doubled(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = doubled
    with pytest.raises(ValueError, match="GraniteForCausalLM.*head_transform"):
        verify_head(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_checkpointing_and_lora_change_no_gradient(name):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_causal_lm(name)
        add_lora(model, dim=2, module_name="all", only_optimize_lora=True)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        tokens, mask = left_and_right_padded()
        TokenLogprobs(model)(tokens, mask, mask).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    plain, recomputed = gradients
    assert any(g.abs().sum() > 0 for g in plain.values())
    for parameter, gradient in plain.items():
        torch.testing.assert_close(recomputed[parameter], gradient)


def test_a_loaded_model_equals_plain_transformers(folder):
    model = load_causal_lm(folder, dtype=torch.float32, tokenizer=load_tokenizer(folder), gradient_checkpointing=True)
    tokens, mask = left_and_right_padded()
    expected, _ = logprobs_by_own_logits(tiny_causal_lm("llama"), tokens[2])
    torch.testing.assert_close(TokenLogprobs(model)(tokens, mask, mask)[2, 1:], expected.float(), atol=2e-5, rtol=1e-4)
    assert model.model.layers[0].gradient_checkpointing
    assert load_causal_lm(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_embeddings_grow_for_new_tokens_and_never_shrink(folder):
    tokenizer = load_tokenizer(folder, add_eot_token=True)
    model = load_causal_lm(folder, dtype=torch.float32, tokenizer=tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY + 1 == model.config.vocab_size
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == VOCABULARY
    assert model.generation_config.eos_token_id == [2, VOCABULARY]
    small = load_causal_lm(folder, dtype=torch.float32, tokenizer=tiny_tokenizer(words=20))
    assert small.get_input_embeddings().weight.shape[0] == VOCABULARY


def test_an_export_stops_at_the_end_of_a_turn_though_the_eos_is_another_token(tmp_path):
    """ChatML over a tokenizer whose EOS is <|endoftext|>: plain generate has to stop where our own decoder does."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    model = load_causal_lm(tmp_path, dtype=torch.float32, tokenizer=tokenizer)
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    export_model(model, tmp_path / "out", tokenizer)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sorted(exported.generation_config.eos_token_id) == sorted([2, end_of_text, end_of_turn])
    with torch.no_grad():
        exported.lm_head.weight.zero_()
        exported.model.norm.weight.zero_()
        exported.lm_head.bias = torch.nn.Parameter(torch.zeros(len(exported.lm_head.weight)))
        exported.lm_head.bias[end_of_turn] = 1.0  # always generates this
    assert exported.generate(torch.tensor([[5, 6]]), max_new_tokens=5).tolist() == [[5, 6, end_of_turn]]


def test_growing_depends_on_the_seed_only(folder):
    tokenizer = load_tokenizer(folder, add_eot_token=True)
    rows = []
    for draws in (0, 5):
        torch.manual_seed(3)
        torch.rand(draws)
        rows.append(load_causal_lm(folder, dtype=torch.float32, tokenizer=tokenizer).lm_head.weight[-1])
    assert rows[0].equal(rows[1])


def test_the_embedding_of_a_pad_token_that_is_also_eos_is_trained(folder):
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(folder, dtype=torch.float32, tokenizer=tokenizer)
    tokens = torch.tensor([[5, tokenizer.pad_token_id, 6]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    TokenLogprobs(model)(tokens, mask, mask).sum().backward()
    assert model.get_input_embeddings().weight.grad[tokenizer.pad_token_id].any()


def test_a_sampling_field_without_do_sample_does_not_spoil_the_export(folder, tmp_path):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.6}))
    model = load_causal_lm(folder, dtype=torch.float32, tokenizer=load_tokenizer(folder, add_eot_token=True))
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_dropout_reaches_every_dropout_field_and_nothing_else():
    for name, fields in {
        "opt": ["dropout", "attention_dropout", "activation_dropout"],
        "gpt2": ["resid_pdrop", "embd_pdrop", "attn_pdrop"],
        "llama": ["attention_dropout"],
        "gpt-neox": ["attention_dropout", "hidden_dropout"],
    }.items():
        config = CONFIGS[name]()
        if name == "opt":
            assert config.layerdrop == 0.0
        set_dropout(config, 0.25)
        assert [getattr(config, field, 0.25) for field in fields] == [0.25] * len(fields)
        assert getattr(config, "layerdrop", 0.0) == 0.0
    with pytest.raises(ValueError, match=r"--dropout 1\.0"):
        set_dropout(CONFIGS["opt"](), 1.0)


def test_dropout_acts_in_training_and_not_in_evaluation(folder):
    model = load_causal_lm(folder, dtype=torch.float32, dropout=0.5)
    wrapped = TokenLogprobs(model)
    tokens, mask = left_and_right_padded()
    assert not wrapped.train()(tokens, mask, mask).equal(wrapped(tokens, mask, mask))
    assert wrapped.eval()(tokens, mask, mask).equal(wrapped(tokens, mask, mask))


def test_a_tokenizer_without_pad_token_pads_with_eos_and_gets_a_chat_template(tmp_path):
    bare = tiny_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.chat_template


def test_unusable_folders_are_refused_with_the_reason(folder, tmp_path):
    with pytest.raises(ValueError, match="no tokenizer"):
        empty = tmp_path / "empty"
        empty.mkdir()
        load_tokenizer(empty)
    with pytest.raises(ValueError, match="no weights"):
        load_causal_lm(empty, dtype=torch.float32)
    with pytest.raises(ValueError, match="not a model that can be loaded"):
        (empty / "model.safetensors").write_bytes(b"")
        load_causal_lm(empty, dtype=torch.float32)
    with pytest.raises(ValueError, match="--add_eot_token"):
        without_eos = tmp_path / "endless"
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = None
        tokenizer.save_pretrained(without_eos)
        load_tokenizer(without_eos)


def test_weights_that_lack_parameters_are_refused(tmp_path):
    model = tiny_causal_lm("llama")
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lack 1 parameters of LlamaForCausalLM \(lm_head\.weight"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_head_with_weights_of_its_own_stays_untied_in_rollouts_and_exports_whatever_the_config_says(tmp_path):
    model = tiny_causal_lm("llama")
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    loaded = load_causal_lm(tmp_path / "model", dtype=torch.float32)
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    engine = HybridEngine(loaded)
    with engine.generation():
        rollout = engine.generate([[5, 6, 7]], max_new_tokens=6, eos_token_ids=None, pad_token_id=0)
    loss_mask = rollout.attention_mask.clone()
    loss_mask[:, : rollout.prompt_length] = False
    logprobs = TokenLogprobs(loaded)(rollout.sequences, rollout.attention_mask, loss_mask)[:, rollout.prompt_length :]
    torch.testing.assert_close(logprobs, rollout.logprobs, atol=1e-5, rtol=1e-5)


def test_a_tied_head_stays_tied(tmp_path):
    tiny_causal_lm("llama-tied").save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, dtype=torch.float32)
    assert loaded.config.tie_word_embeddings is True and loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_the_id_limit_counts_gaps_in_the_vocabulary():
    tokenizer = tiny_tokenizer(words=20)
    assert id_limit(tokenizer) == len(tokenizer) == 20
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 3, "word": 4, "</s>": 50}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    gaps = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    assert id_limit(gaps) == 51 and len(gaps) < 51
