"""Sampled drafts and rejection sampling in the engine: every outcome of every draw, followed through its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dcut_kernels.cost import AngelSlimRatios, CostTable
from dcut_kernels.engine import Engine
from dcut_kernels.engine import engine as engine_module
from dcut_kernels.models import Config, Drafter, Target
from dcut_kernels.sampling import Dice, reject

VOCAB, DRAFT_LEN, TOKENS = 2, 2, 4
SMALL = Config(VOCAB, 16, 16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
COSTS = CostTable((1, 2), ((1.0, 1.45, 2.0), (1.5, 2.3, 3.4)), AngelSlimRatios((0.0, 0.5, 1.0), DRAFT_LEN))
Outcome = tuple[tuple[int, ...], ...]


class Tree(Dice):
    """Takes every branch once: each draw of a run follows a path, and new draws remember what else they could be."""

    def __init__(self) -> None:
        self.path: list[int] = []
        self.open: list[tuple[list[int], int]] = []

    def start(self, path: list[int]) -> None:
        self.path, self.at, self.weight = path, 0, 1.0

    def _pick(self, probs: list[float]) -> int:
        if self.at == len(self.path):
            possible = [k for k, p in enumerate(probs) if p > 0]
            self.open += [([*self.path, k], self.at) for k in possible[1:]]
            self.path = [*self.path, possible[0]]
        choice = self.path[self.at]
        self.at += 1
        self.weight *= probs[choice]
        return choice

    def draw(self, probs: Tensor) -> Tensor:
        rows = probs.double().reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._pick(row) for row in rows]).reshape(probs.shape[:-1])

    def decide(self, probs: Tensor) -> Tensor:
        return torch.tensor([self._pick([1 - p, p]) == 1 for p in probs.double().tolist()], dtype=torch.bool)


def distribution(run: Callable[[Tree], Outcome]) -> dict[Outcome, float]:
    """The exact distribution of what a run returns."""
    tree, found = Tree(), defaultdict(float)
    tree.open.append(([], 0))
    while tree.open:
        tree.start(tree.open.pop()[0])
        found[run(tree)] += tree.weight
    return found


def models(seed: int) -> tuple[Target, Drafter]:
    torch.manual_seed(seed)
    pair = Target(SMALL, (0, 1)), Drafter(SMALL, (0, 1), DRAFT_LEN)
    for model in pair:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.5)
        model.eval().requires_grad_(False)
    return pair


def texts(policy: str, seed: int, prompts: list[list[int]], tokens: int) -> dict[Outcome, float]:
    pair, sizes = models(seed), set()

    def run(tree: Tree) -> Outcome:
        engine = Engine(*pair, policy, COSTS, max_batch=2, max_len=16, chunk=4, temperature=1.0, dice=tree, eos=-1)
        outputs = engine.generate(prompts, tokens, on_step=lambda step: sizes.add(tuple(step.keep_lens)))
        return tuple(map(tuple, outputs))

    found = distribution(run)
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    assert "dcut" not in policy or len(sizes) > 2, "the policy has to choose"
    return found


def distance(found: dict[Outcome, float], right: dict[Outcome, float]) -> float:
    return sum(abs(found.get(key, 0.0) - right.get(key, 0.0)) for key in {*found, *right}) / 2


@pytest.mark.parametrize("policy", ["full", "uniform-1", "dcut-early_stop", "dcut-history"])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_request(policy: str, seed: int) -> None:
    right = texts("ar", seed, [[1, 0, 1]], TOKENS)
    assert len(right) == VOCAB**TOKENS
    assert distance(texts(policy, seed, [[1, 0, 1]], TOKENS), right) < 1e-5


@pytest.mark.parametrize("policy", ["dcut-early_stop", "dcut-history"])
def test_two_requests_that_share_a_budget(policy: str) -> None:
    prompts = [[1, 0, 1], [0]]
    right = texts("ar", 0, prompts, 3)
    assert distance(texts(policy, 0, prompts, 3), right) < 1e-5


def test_a_wrong_residual_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(target: Tensor, draft: Tensor, draft_ids: Tensor, dice: Dice) -> Tensor:
        return reject(target, torch.where(draft > 0.5, draft, 0.9 * draft), draft_ids, dice)

    right = texts("ar", 0, [[1, 0, 1]], TOKENS)
    monkeypatch.setattr(engine_module, "reject", wrong)
    assert distance(texts("dcut-history", 0, [[1, 0, 1]], TOKENS), right) > 1e-3


def test_the_argmax_of_this_step_is_refused() -> None:
    with pytest.raises(ValueError, match="combination: expected one that keeps the target's distribution"):
        Engine(*models(0), "dcut", COSTS, temperature=1.0, dice=Dice())


def test_rejection_by_hand() -> None:
    """Rows of three, one and two places; the first place that is not accepted draws from what the target has left."""

    class Scripted(Dice):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def decide(self, probs: Tensor) -> Tensor:
            self.seen.append(probs)
            return torch.tensor([True, False, False, False, True, False])

        def draw(self, probs: Tensor) -> Tensor:
            self.seen.append(probs)
            return probs.argmax(-1)

    target = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [1.0, 0.0]])
    draft = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.1, 0.9], [0.5, 0.5], [0.6, 0.4], [0.5, 0.5]])
    dice = Scripted()
    assert reject(target, draft, torch.tensor([0, 0, -1, -1, 1, -1]), dice).tolist() == [0, 1, -1, 1, 1, 0]
    ratios, rest = dice.seen
    assert ratios.tolist() == pytest.approx([0.5 / 0.8, 0.2 / 0.6, 0, 0, 1, 0])
    assert rest.tolist() == [pytest.approx(row) for row in ([0.0, 1.0], [0.3, 0.7], [1.0, 0.0])]
