"""The tiny pair: its figures are what they say, and other engines can load its files."""

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dcut_kernels.engine import Engine, load_pair

PAIR = Path(__file__).parents[1] / "examples" / "tiny_pair"
sys.path.insert(0, str(PAIR))

import dense  # noqa: E402
import evaluate  # noqa: E402
import train  # noqa: E402

PROMPTS = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
ODD_TEXT = "\tif x:\r\n  é€ 日本語 🙂\x00 <eo s>\n\n\n"


@pytest.fixture(scope="module")
def pair():
    return load_pair(str(PAIR))


@pytest.fixture(scope="module")
def card():
    return json.loads((PAIR / "card.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))


def read_json(*path):
    return json.loads(PAIR.joinpath(*path).read_text(encoding="utf-8"))


def test_a_step_moves_on_by_its_accepted_drafts_and_the_bonus_token():
    assert evaluate.walk([2, 9, 9, 0, 1, 9, 3]) == [2, 0, 1, 3]
    assert evaluate.walk([]) == []
    assert evaluate.mat([[2, 0, 1, 3], [], [0]]) == pytest.approx(1 + 6 / 5)
    assert math.isnan(evaluate.mat([[]]))


def test_acceptance_of_a_draft_counts_only_where_those_before_it_were_accepted():
    assert evaluate.acceptance_by_position(np.array([0, 1, 1, 2, 3]), 3) == [4 / 5, 2 / 4, 1 / 2]
    assert evaluate.acceptance_by_position(np.array([0, 1, 0]), 3) == [1 / 3, 0.0, None]  # JSON has no NaN


def test_a_repeat_is_the_last_token_of_an_n_gram_that_the_text_had():
    loop = [*range(1, train.LOOP + 1)]
    fresh = [100, *loop, 101, *loop, 102]
    marks = train.repeats(torch.tensor([fresh]))[0]
    assert marks.nonzero()[:, 0].tolist() == [2 * train.LOOP + 1]  # the end of the second time, and nothing else
    assert train.repeats(torch.full((1, 9), 7))[0].tolist() == [False] * train.LOOP + [True] * 3


def test_a_second_stage_trains_what_the_first_one_froze():
    model = torch.nn.Linear(2, 2)
    for _ in range(2):
        before = model.weight.detach().clone()
        train.train(model, lambda: (model(torch.ones(1, 2)) ** 2).sum(), 0.05, "stage")
        assert not torch.equal(model.weight, before)
        assert not model.weight.requires_grad


def test_ties_count_half_in_the_ranking():
    scores, accepted = np.array([0.9, 0.5, 0.5, 0.1, 0.3]), np.array([1, 1, 0, 0, 1])
    pairs = [(a > b) + (a == b) / 2 for a in scores[accepted == 1] for b in scores[accepted == 0]]
    ranks = np.array([5, 3.5, 3.5, 1, 2])
    ranking = evaluate.ranking(scores, accepted)
    assert ranking["auroc"] == pytest.approx(sum(pairs) / 6)
    assert ranking["spearman"] == pytest.approx(np.corrcoef(ranks, accepted)[0, 1])


def test_reliability_bins_and_their_distance_from_the_diagonal():
    bins = evaluate.reliability(np.array([0.0, 0.04, 0.55, 0.57, 0.9, 1.0]), np.array([0, 1, 1, 0, 0, 1]))
    assert bins == [
        {"score": pytest.approx(0.02), "accepted": 0.5, "drafts": 2},
        {"score": pytest.approx(0.56), "accepted": 0.5, "drafts": 2},
        {"score": pytest.approx(0.95), "accepted": 0.5, "drafts": 2},
    ]
    assert evaluate.calibration_error(bins) == pytest.approx((2 * 0.48 + 2 * 0.06 + 2 * 0.45) / 6)


def test_a_text_loops_below_the_share_of_distinct_grams():
    grams = 128 - evaluate.GRAM + 1
    enough = math.ceil(evaluate.DISTINCT * grams)
    # `enough` grams that start in the rising part or across its end, the others of one token only
    rising = list(range(2, 2 + enough - 1))
    assert not evaluate.loops(rising + [1] * (128 - len(rising)))
    assert evaluate.loops(rising[1:] + [1] * (129 - len(rising)))
    assert not evaluate.loops([5, 5])


def test_a_text_ends_with_its_first_eos():
    assert evaluate.until_eos([5, 0, 6, 0]) == [5, 0]
    assert evaluate.until_eos([5, 6]) == [5, 6]


def test_figures_of_a_depth_leave_out_anchors_past_the_end():
    accepted = np.array([[[1, 1], [0, 0], [1, 0]], [[1, 0], [1, 1], [1, 1]]])
    scores = np.array([[[0.9, 0.8], [0.2, 0.1], [0.7, 0.3]], [[0.6, 0.4], [0.0, 0.0], [0.0, 0.0]]])
    figures = evaluate.at_depth(scores, accepted, [3, 1], np.array([True, False]))
    assert figures["mat"] == pytest.approx(1 + 3 / 2)  # steps of 2 and of 1 accepted drafts
    assert figures["mat_without_loops"] == pytest.approx(2)
    assert figures["steps_by_accepted"] == [0, 1, 1]
    assert figures["auroc"] == pytest.approx(1)
    assert sum(one["drafts"] for one in figures["reliability"]) == 8


def test_drafts_of_the_evaluation_are_those_of_the_engine(pair, tokenizer):
    prompts = [tokenizer.encode(text).ids for text in PROMPTS[:4]]
    prompts.append(prompts[0][::-1])  # of the length of another one
    sequences = evaluate.generate(pair[0], prompts)
    scores, accepted, losses = evaluate.draft(*pair, sequences, [len(prompt) for prompt in prompts])
    right = accepted == 1
    assert 0 < right.mean() < 1
    np.testing.assert_allclose(scores[right], np.exp(-losses.cumsum(2))[right], rtol=1e-4)
    assert (losses > -np.log(scores))[:, :, 0][~right[:, :, 0]].all()
    for prompt, ids, of_anchor, row in zip(prompts, sequences, scores, accepted, strict=True):
        steps = []
        text = Engine(*pair, "full", max_batch=1).generate([prompt], evaluate.TOKENS, on_step=steps.append)[0]
        assert text == evaluate.until_eos(ids[len(prompt) :].tolist())
        walk = evaluate.walk(row.sum(1)[: max(0, len(text) - pair[1].draft_len)])
        drafted = [step for step in steps if step.drafts.draft_lens[0]][: len(walk)]
        assert [step.accepted[0] for step in drafted] == walk
        anchors = np.cumsum([0, *walk])[:-1] + np.arange(len(walk))
        products = torch.cat([step.drafts.confidence for step in drafted]).cumprod(1)
        np.testing.assert_allclose(of_anchor[anchors], products, rtol=1e-3, atol=1e-5)


def test_loss_of_held_out_text_is_that_of_transformers(pair, tokenizer, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOWS", 3)
    texts = [text for text in PROMPTS if text.isascii()]
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    stream = evaluate.encode(tokenizer, texts)
    rows = evaluate.windows(stream, 3, evaluate.CONTEXT + 1, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        loss = model(rows, labels=rows).loss.item()
    size = sum(len(tokenizer.decode(row.tolist())) for row in rows[:, 1:])
    result = evaluate.language_model(pair[0], tokenizer, texts)
    assert result["loss_per_token"] == pytest.approx(loss, rel=1e-4)
    assert result["held_out_bytes"] == size
    assert result["bits_per_byte"] == pytest.approx(loss * 3 * evaluate.CONTEXT / math.log(2) / size, rel=1e-4)


def test_token_sizes_add_up_to_the_bytes_of_a_text(tokenizer):
    counts = evaluate.byte_counts(tokenizer)
    for text in [*PROMPTS, ODD_TEXT]:
        assert counts[tokenizer.encode(text).ids].sum() == len(text.encode())
    assert counts[evaluate.EOS] == 0


def test_the_target_loads_in_transformers(pair, tokenizer):
    target = pair[0]
    model, loading = AutoModelForCausalLM.from_pretrained(
        PAIR / "target", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    ids = torch.tensor([tokenizer.encode(PROMPTS[0]).ids])
    with torch.inference_mode():
        ours = target.logits(dense.run_target(target, ids)[0])
        torch.testing.assert_close(model(ids).logits, ours, rtol=1e-4, atol=1e-4)
    text = model.generate(ids, max_new_tokens=48, do_sample=False)
    torch.testing.assert_close(text, dense.greedy(target, ids, 48)[:, : text.shape[1]])


def test_the_snippet_of_the_model_card_runs(monkeypatch, capsys):
    snippet = (PAIR / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(PAIR.parents[1])
    exec(snippet, {})
    assert capsys.readouterr().out.startswith("def main() -> None:\n    parser = argparse.")


def test_the_tokenizer_loads_in_transformers_and_round_trips(tokenizer):
    loaded = AutoTokenizer.from_pretrained(PAIR / "target")
    for text in [*PROMPTS, ODD_TEXT]:
        ids = loaded(text).input_ids
        assert ids == tokenizer.encode(text).ids
        assert loaded.decode(ids) == text
    assert loaded.eos_token_id == evaluate.EOS
    assert read_json("drafter", "tokenizer.json") == read_json("target", "tokenizer.json")


def test_the_drafter_has_what_engines_read_of_a_dflash_drafter(pair):
    target, drafter = (AutoConfig.from_pretrained(PAIR / name) for name in ("target", "drafter"))
    assert drafter.architectures == ["DFlashDraftModel"]
    assert (drafter.vocab_size, drafter.hidden_size) == (target.vocab_size, target.hidden_size)
    assert drafter.num_target_layers == target.num_hidden_layers
    assert drafter.block_size == max(evaluate.DEPTHS) + 1
    layers = drafter.dflash_config["target_layer_ids"]
    assert layers == sorted(set(layers))
    assert 0 <= layers[0] <= layers[-1] < target.num_hidden_layers
    assert not drafter.use_sliding_window
    assert set(drafter.layer_types) == {"full_attention"}  # sliding ones would be causal
    mask = torch.load(PAIR / "drafter" / "mask_embedding.pt", weights_only=True)
    assert mask["mask_token_id"] == drafter.dflash_config["mask_token_id"]
    assert mask["embedding"].shape == (target.hidden_size,)
    assert mask["embedding"].count_nonzero()


def test_prompts_are_distinct_and_of_24_to_96_tokens(tokenizer):
    assert len(set(PROMPTS)) == len(PROMPTS) == 256
    lengths = [len(tokenizer.encode(text).ids) for text in PROMPTS]
    assert min(lengths) >= 24
    assert max(lengths) <= 96


def test_the_card_is_of_these_files(card, pair):
    for name, file in card["files"].items():
        content = (PAIR / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"]), name
    assert [card[name]["parameters"] for name in ("target", "drafter")] == [evaluate.parameters(m) for m in pair]
    assert card["texts"]["prompts"] == len(PROMPTS)


def test_the_model_card_shows_the_figures(card):
    shown = (PAIR / "README.md").read_text(encoding="utf-8").splitlines()
    missing = [row for name, value in evaluate.figures(card) if (row := f"| {name} | {value} |") not in shown]
    assert not missing


def test_the_weights_fit_in_12_megabytes():
    weights = [path for kind in ("*.safetensors", "*.pt") for path in PAIR.rglob(kind)]
    assert len(weights) == len(evaluate.WEIGHTS)
    assert sum(path.stat().st_size for path in weights) <= 12e6
