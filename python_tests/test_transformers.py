"""A model of transformers in the engine writes what it generates alone, in one run a step and without padding."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs transformers")

from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dcut_kernels.cost import AngelSlimRatios, CostTable, interpolate
from dcut_kernels.demo.compare import compare
from dcut_kernels.engine import Engine, bucket_depths, load_pair
from dcut_kernels.integration.transformers import NAME, TransformersEngine, TransformersTarget

PAIR = Path(__file__).parents[1] / "examples" / "tiny_pair"
POLICIES = ("ar", "full", "uniform-3", "dcut")
TOKENS, DRAFTS = 24, 5
SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def load():
    return AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)


def small(kind, **options):
    """A small model of random weights, large enough for the logits to tell."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SMALL, "initializer_range": 0.2, **options})
    return AutoModelForCausalLM.from_config(config).float()


def costs_of(draft_len):
    """Costs that make D-cut keep some drafts and prune others."""
    ends = CostTable((1, 8), ((3.0, 7.0), (6.0, 20.0)), AngelSlimRatios((0.0, 1.0), draft_len))
    return interpolate(ends, AngelSlimRatios(tuple(n / draft_len for n in bucket_depths(draft_len)), draft_len))


@pytest.fixture(scope="module")
def pair():
    return load_pair(PAIR)


@pytest.fixture(scope="module")
def target(pair):
    return TransformersTarget(load(), pair[0].feature_layers)


@pytest.fixture(scope="module")
def prompts():
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    texts = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))[:8]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


@pytest.fixture(scope="module")
def generated(prompts):
    """What the model writes by itself, prompt by prompt."""
    model, texts = load(), []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        texts.append(output[0, len(prompt) :].tolist())
    return texts


def lookup(texts):
    """Drafts of prompt lookup: what followed the last token when it last occurred."""
    confidence, drafts = torch.full((len(texts), DRAFTS), 0.5), torch.zeros(len(texts), DRAFTS, dtype=torch.int64)
    for row, text in enumerate(texts):
        places = [i for i in range(len(text) - 1) if text[i] == text[-1]]
        found = text[places[-1] + 1 :][:DRAFTS] if places else []
        drafts[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
        confidence[row, len(found) :] = 0.0
    return confidence, drafts


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_is_that_of_generate_and_of_the_engine(pair, target, prompts, generated, policy, batch):
    engine, steps = Engine(target, pair[1], policy, costs_of(15), max_batch=batch), []
    texts = engine.generate(prompts, TOKENS, on_step=steps.append)
    own = Engine(*pair, policy, costs_of(15), max_batch=batch).generate(prompts, TOKENS)
    for expected in (generated, own):
        comparison = compare(pair[0], prompts, texts, expected)
        assert (comparison.equal, comparison.different) == (len(prompts), [])
    accepted, kept = (sum(sum(getattr(step, name)) for step in steps) for name in ("accepted", "keep_lens"))
    drafted = sum(int(step.drafts.draft_lens.sum()) for step in steps)
    assert (policy == "ar") == (accepted == 0)
    assert {"ar": kept == 0, "full": 0 < kept == drafted}.get(policy, 0 < kept < drafted)


def test_each_step_is_one_run_over_the_packed_tokens(pair, target, prompts):
    runs, linear = [], []
    layers = target.model.model.layers
    handles = [
        target.model.model.register_forward_pre_hook(
            lambda _, args, kwargs: runs.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        ),
        layers[0].self_attn.q_proj.register_forward_hook(lambda _, args, __: linear.append(tuple(args[0].shape[:2]))),
        layers[-1].mlp.gate_proj.register_forward_hook(lambda _, args, __: linear.append(tuple(args[0].shape[:2]))),
    ]
    steps = []
    Engine(target, pair[1], "dcut", costs_of(15), max_batch=8).generate(prompts, 8, on_step=steps.append)
    for handle in handles:
        handle.remove()
    assert len({tuple(step.keep_lens) for step in steps}) > 2
    assert runs == [(1, step.verified) for step in steps]
    assert linear == [shape for shape in runs for _ in range(2)]


def test_hidden_states_and_features_are_those_of_the_own_target(pair, target, prompts):
    def attend(layer, *qkv):
        q, k, v = (x.transpose(0, 1) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    ids = torch.tensor(prompts[0])
    theirs, ours = (model(ids, torch.arange(len(ids)), attend) for model in (target, pair[0]))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(theirs[0]), pair[0].logits(ours[0]), rtol=1e-4, atol=1e-4)
    assert torch.equal(target.embed_tokens(ids), pair[0].embed_tokens(ids))


@pytest.mark.parametrize("policy", ["full", "dcut"])
def test_drafts_come_from_any_callable(pair, prompts, generated, policy):
    asked, steps = [], []

    def draft(texts):
        asked.append(texts)
        return lookup(texts)

    engine = TransformersEngine(load(), draft, DRAFTS, policy, costs_of(DRAFTS), max_batch=8)
    texts = engine.generate(prompts, TOKENS, on_step=steps.append)
    assert compare(pair[0], prompts, texts, generated).equal == len(prompts)
    assert sum(sum(step.accepted) for step in steps) > 0
    drafted = [step.drafts for step in steps if step.drafts.draft_lens.any()]
    assert [[text[-1] for text in texts] for texts in asked] == [
        drafts.bonus_ids[drafts.draft_lens > 0].tolist() for drafts in drafted
    ]


def test_steps_can_be_profiled():
    engine = TransformersEngine(small("llama"), lookup, DRAFTS, "full", max_batch=2)
    seen = []
    engine.target.model.model.register_forward_hook(lambda _, args, output: seen.append(output[0].shape[1]))
    engine.run_step(2, 7)
    assert seen[-1] == 7


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "mixtral", "granite", "olmo2", "gpt2"])
def test_other_models_write_their_own_text(kind):
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 120, 9, 3], [77]]
    options = {"granite": {"attention_multiplier": 0.9}, "gpt2": {"bos_token_id": 0, "eos_token_id": 0}}.get(kind, {})
    model, expected = small(kind, **options).eval(), []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(10):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    engine = TransformersEngine(model.train(), lookup, DRAFTS, "full", max_batch=3, eos=-1)
    assert engine.generate(prompts, 10) == expected
    assert engine.generate(prompts[2:], 10) == expected[2:]  # its first step is a single token


REFUSED = {
    "sliding_window=4 in layer 0": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "softcap=50.0 in layer 0": ("gemma2", {"final_logit_softcapping": None, "layer_types": ["full_attention"] * 2}),
    "final_logit_softcapping=30.0": ("gemma2", {}),
    "s_aux=a tensor in layer 0": ("gpt_oss", {"layer_types": ["full_attention"] * 2}),
    "one that takes position_ids, got BloomForCausalLM": ("bloom", {}),
    "one that takes position_ids, got MambaForCausalLM": ("mamba", {}),
    "2 layers whose attention can be set, got 0 in XGLMForCausalLM": (
        "xglm", {"num_layers": 2, "d_model": 32, "attention_heads": 4, "ffn_dim": 64},
    ),
    "got others by": ("cohere", {}),  # scales its logits behind the head
    "got keys (1, 4, 16, 24) and values (1, 4, 16, 32)": (
        "deepseek_v3", {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 32},
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_that_it_cannot_serve_is_refused_and_left_as_it_was(words):
    kind, options = REFUSED[words]
    model = small(kind, **options)
    own, ids = model.config._attn_implementation, torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model.eval()(ids).logits
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        TransformersTarget(model)
    assert str(error.value).startswith("model: expected ")
    assert model.config._attn_implementation == own
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_errors_name_the_argument(target):
    def message(call, kind=ValueError):
        with pytest.raises(kind) as error:
            call()
        return str(error.value)

    assert (
        message(lambda: TransformersTarget(small("llama"), [0, 1]))
        == "feature_layers: expected layers 0 to 0, got [0, 1]"
    )
    assert message(lambda: TransformersTarget(small("llama").bfloat16())) == (
        "model: expected torch.float32 on cpu, as the engine's cache, got torch.bfloat16 on cpu"
    )
    by_itself = message(lambda: target.model(torch.tensor([[1, 2]])), RuntimeError)
    assert by_itself == "attention: expected a run of TransformersTarget, got one of the model by itself"
    assert target.model.config._attn_implementation == NAME
    other = TransformersTarget(small("llama"))
    other.model.set_attn_implementation("sdpa")
    run = message(lambda: other(torch.tensor([1]), torch.tensor([0]), lambda layer, q, k, v: q))
    assert run == "model: expected 2 layers whose attention can be set, got 0 in LlamaForCausalLM"
