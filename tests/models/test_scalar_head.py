from __future__ import annotations

import logging

import pytest
import torch
import transformers as hf
from tiny_models import HIDDEN, VOCABULARY, left_and_right_padded, tiny_causal_lm, tiny_classifier, tiny_tokenizer

from dschat.models.scalar_head import TokenScores, has_scalar_head, last_token_scores, load_scalar_head
from dschat.models.weights import export_model

DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "gpt2", "opt", "opt-projected", "gpt-neox"]


@pytest.fixture
def causal_folder(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    return tmp_path


def tiny_bert():
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=1,
        pad_token_id=0,
    )
    return hf.BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("name", DECODERS)
def test_last_scores_equal_transformers_pooled_logits_under_either_padding(name):
    model = tiny_classifier(name).eval()
    tokens, mask = left_and_right_padded()
    tokens = tokens.clamp(min=1)  # the pad id is 0: here the text has none, as transformers pools by id
    last_scores = last_token_scores(TokenScores(model)(tokens, mask), mask)
    alone = torch.stack([model(input_ids=tokens[r, mask[r]][None]).logits[0, 0] for r in range(3)])
    torch.testing.assert_close(last_scores, alone, atol=1e-4, rtol=1e-4)
    assert len(last_scores.unique()) == 3
    right_padded = tokens[1:].masked_fill(~mask[1:], 0)
    pooled = model(input_ids=right_padded, attention_mask=mask[1:].long()).logits[:, 0]
    torch.testing.assert_close(last_scores[1:], pooled, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_score_depends_on_its_prefix_only(name):
    scores = TokenScores(tiny_classifier(name).eval())
    tokens, mask = left_and_right_padded()
    every = scores(tokens, mask)
    for length in (1, 4, 10):
        prefix = scores.sequence_scores(tokens[2:, :length], mask[2:, :length])
        torch.testing.assert_close(every[2, length - 1 : length], prefix, atol=1e-4, rtol=1e-4)


def test_scores_do_not_depend_on_ids_under_the_padding_and_pad_ids_in_the_text_count():
    scores = TokenScores(tiny_classifier("llama").eval())
    tokens, mask = left_and_right_padded()
    tokens[:, 6] = 0  # the last real token of row 1 is the pad id
    other_padding = torch.where(mask, tokens, (tokens + 11) % VOCABULARY)
    torch.testing.assert_close(scores.sequence_scores(other_padding, mask), scores.sequence_scores(tokens, mask))
    cut = scores.sequence_scores(tokens[1:2, :6], mask[1:2, :6])
    assert (scores.sequence_scores(tokens, mask)[1] - cut).abs() > 1e-3


def test_last_token_scores_by_hand():
    scores = torch.arange(12.0).view(3, 4)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    assert last_token_scores(scores, mask).tolist() == [3.0, 5.0, 8.0]
    with pytest.raises(ValueError, match="empty sequence"):
        last_token_scores(scores, torch.zeros(3, 4).bool())


def test_a_new_head_is_small_and_a_function_of_the_seed_alone(causal_folder, caplog):
    assert not has_scalar_head(causal_folder)
    heads = []
    for seed, draws in ((5, 0), (5, 3), (6, 0)):
        torch.manual_seed(seed)
        torch.rand(draws)
        model = load_scalar_head(causal_folder, dtype=torch.float32, tokenizer=tiny_tokenizer())
        heads.append(model.score.weight)
    assert "new one was initialised" in caplog.text
    assert heads[0].shape == (1, HIDDEN) and heads[0].equal(heads[1]) and not heads[0].equal(heads[2])
    # 16 draws with standard deviation 1/√17 = 0.2425: a sample's own lies within 0.12 and 0.37 (three of its errors).
    assert 0.12 < heads[0].std() < 0.37
    backbone = tiny_causal_lm("llama").model.state_dict()
    assert all(value.equal(backbone[name]) for name, value in model.model.state_dict().items())


def test_a_saved_head_is_loaded_here_and_by_plain_transformers(causal_folder, tmp_path, caplog):
    model = load_scalar_head(causal_folder, dtype=torch.float32, tokenizer=tiny_tokenizer())
    export_model(TokenScores(model), tmp_path / "reward", tiny_tokenizer())
    assert has_scalar_head(tmp_path / "reward")
    with caplog.at_level(logging.INFO):
        again = load_scalar_head(tmp_path / "reward", dtype=torch.float32)
    assert "head was loaded" in caplog.text and again.score.weight.equal(model.score.weight)
    plain = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    assert plain.config.num_labels == 1 and plain.config.pad_token_id == 0
    tokens = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    expected = plain(input_ids=tokens, attention_mask=mask.long()).logits[:, 0]
    torch.testing.assert_close(TokenScores(again.eval()).sequence_scores(tokens, mask), expected)


def test_gradients_reach_head_and_backbone_of_the_scored_tokens_only():
    model = tiny_classifier("llama")
    tokens, mask = left_and_right_padded()
    last_token_scores(TokenScores(model)(tokens, mask), mask)[1].backward()
    embedded_ids = model.get_input_embeddings().weight.grad.abs().sum(1).nonzero().squeeze(1)
    assert set(embedded_ids.tolist()) <= set(tokens[1, :7].tolist()) and len(embedded_ids)
    assert model.score.weight.grad.any()


def test_a_classifier_of_several_classes_is_refused(tmp_path):
    config = tiny_causal_lm("llama").config
    config.num_labels = 3
    hf.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_labels = 3"):
        load_scalar_head(tmp_path, dtype=torch.float32)


def test_an_encoder_scores_whole_sequences_under_either_padding_and_is_refused_as_critic(tmp_path):
    bert = tiny_bert()
    bert.save_pretrained(tmp_path)
    scores = TokenScores(load_scalar_head(tmp_path, dtype=torch.float32).eval())
    tokens, mask = left_and_right_padded()
    expected = torch.stack([bert(input_ids=tokens[r, mask[r]][None]).logits[0, 0] for r in range(3)])
    torch.testing.assert_close(scores(tokens, mask, whole_sequence=True), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="scores whole sequences only"):
        scores(tokens, mask)


def test_scores_of_a_bfloat16_model_are_float32(causal_folder):
    model = load_scalar_head(causal_folder, dtype=torch.bfloat16, gradient_checkpointing=True)
    tokens, mask = left_and_right_padded()
    scores = TokenScores(model)(tokens, mask)
    assert model.dtype == torch.bfloat16 and scores.dtype == torch.float32
    scores.sum().backward()
    assert model.get_input_embeddings().weight.grad.any()
