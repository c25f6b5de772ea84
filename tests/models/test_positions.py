"""The number of positions of a model, for every way its config stores it."""

import pytest
import torch
import transformers
from architectures import generate_each_alone, tiny_architecture, tiny_config
from tiny_models import tiny_causal_lm, tiny_tokenizer

from dschat.generation import Decoder, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.positions import position_limit
from dschat.runs.validation import model_problems

# Short factors up to 16 positions, long ones beyond.
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4, "factor": 8.0,
    },
    "original_max_position_embeddings": 16,
}  # fmt: skip


def test_the_position_limit_is_read_from_every_kind_of_config():
    assert position_limit(tiny_config("llama"))[0] == position_limit(tiny_config("gpt2"))[0] == 128
    assert position_limit(tiny_config("bloom"))[0] is None, "ALiBi has no limit"
    assert position_limit(transformers.XLNetConfig())[0] is None
    vision = transformers.Gemma3Config(text_config={"max_position_embeddings": 77})
    assert position_limit(vision)[0] == 77
    limit, kind = position_limit(tiny_config("phi3", **LONGROPE))
    assert limit == 16 and "longrope" in kind


def test_a_rollout_that_would_change_the_frequencies_of_other_rows_is_refused():
    model = tiny_architecture("phi3", **LONGROPE)
    settings = {"eos_token_ids": None, "pad_token_id": 0}
    assert Decoder(model).generate([[5] * 8], max_new_tokens=9, **settings).response_mask.all()
    with pytest.raises(ValueError, match="18 with max_new_tokens 10.*16 positions until longrope.*copy long_factor"):
        Decoder(model).generate([[5] * 8], max_new_tokens=10, **settings)


def assert_equals_generate(model, prompts, new_tokens):
    rollout = Decoder(model).generate(
        prompts, max_new_tokens=new_tokens, eos_token_ids=None, pad_token_id=0, sampling=SamplingParams(0)
    )
    assert rollout.responses() == generate_each_alone(model, prompts, new_tokens)


def test_longrope_with_equal_factors_is_not_limited():
    factors = {**LONGROPE["rope_parameters"], "short_factor": [4.0] * 4}
    model = tiny_architecture("phi3", **{**LONGROPE, "rope_parameters": factors})
    assert position_limit(model.config) == (128, "positions")
    assert_equals_generate(model, [[5, 6, 7] * 6, [9, 4]], 12)


def test_padding_changes_the_tokens_that_a_sparse_indexer_selects_among_equal_scores():
    """Both ReLUs are 0 for a quarter of all tokens: beyond index_topk, padding decides which of these are selected."""
    model = tiny_architecture("deepseek_v32", index_topk=8)
    tokens = torch.arange(30).unsqueeze(0) * 7919 % 97
    padded = torch.cat([tokens[:, :13], tokens], dim=1)
    mask = (torch.arange(43) >= 13).long().unsqueeze(0)
    with torch.no_grad():
        alone = model(tokens, attention_mask=torch.ones_like(tokens)).logits[0]
        with_padding = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[0, 13:]
    torch.testing.assert_close(with_padding[:8], alone[:8], atol=1e-4, rtol=1e-4)
    assert (with_padding - alone).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:.*decoded without the KV pool")
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_sparse_indexer_is_decoded_while_it_selects_all_tokens(kind):
    latent = {"num_key_value_heads": 4}
    with pytest.raises(ValueError, match="10 with max_new_tokens 7, .* 8 tokens until its sparse indexer.*index_topk"):
        assert_equals_generate(tiny_architecture(kind, index_topk=8, **latent), [[5, 6, 7], [9, 4]], 7)
    assert_equals_generate(tiny_architecture(kind, index_topk=40, **latent), [[5, 6, 7] * 6, [9, 4], [30]], 20)


def test_lengths_are_checked_against_the_text_part_before_anything_is_loaded(tmp_path):
    transformers.Gemma3Config(text_config={"max_position_embeddings": 77}).save_pretrained(tmp_path)
    problems = model_problems("--model", str(tmp_path), tokens=78, lengths="--max_seq_len 78", add_eot_token=False)
    assert any("78 tokens" in problem and "77 positions" in problem for problem in problems)


def test_ids_that_the_model_does_not_have_are_refused_before_the_device_faults():
    model = tiny_causal_lm("llama").eval()
    with pytest.raises(ValueError, match="ids from 5 to 67, but the model's vocabulary has 67.*own tokenizer"):
        Decoder(model).generate([[5], [66, 67]], max_new_tokens=2, eos_token_ids=None, pad_token_id=0)


def test_a_tokenizer_larger_than_a_model_that_does_not_grow_is_refused(tmp_path, monkeypatch):
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.PreTrainedModel, "resize_token_embeddings", lambda self, rows: None)
    with pytest.raises(ValueError, match="ids up to 69, but the Embedding of a LlamaForCausalLM has 67 rows"):
        load_causal_lm(tmp_path, dtype=torch.float32, tokenizer=tiny_tokenizer(words=70))


def test_a_folder_with_a_sentencepiece_model_alone_is_refused_with_the_remedy(tmp_path):
    transformers.LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no tokenizer")
    with pytest.raises(ValueError, match="only tokenizer.model: pip install sentencepiece.*save_pretrained"):
        load_tokenizer(tmp_path)
