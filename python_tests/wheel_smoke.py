"""Smoke test of an installed wheel; `make wheel` runs it in an environment that holds only torch and the wheel."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

import torch

import dcut_kernels
from dcut_kernels import backends
from dcut_kernels.jit import source


def main() -> None:
    package, checkout = Path(dcut_kernels.__file__).resolve().parent, Path(__file__).resolve().parents[1]
    assert package != checkout / "dcut_kernels", f"imported the checkout, not the wheel: {package}"
    assert backends.chosen("cpu") == "cpu", backends.explain()

    shipped = {str(path) for path in files("dcut_kernels") or ()}
    assert {"dcut_kernels/libdcut.so", "dcut_kernels/include/dcut/step.cuh"} < shipped
    assert not [name for name in shipped if "_simt." in name or "csrc" in name or name.endswith((".cpp", ".cu"))]
    assert source.include_dir() == package / "include", source.include_dir()
    assert all(Path(option[2:]).is_dir() for option in source.options() if option.startswith("-I"))
    assert any(Path(source.options()[-1][2:]).glob("*.h"))

    confidence = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    drafts, bonus = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([7, 8], dtype=torch.int32)
    seq_lens = torch.tensor([10, 20])
    budgets, costs = torch.tensor([2, 6], dtype=torch.int32), torch.tensor([2.0, 2.5])
    inputs = (confidence, drafts, bonus, seq_lens, budgets, costs)
    batch, expected = dcut_kernels.select_and_pack(*inputs), backends.get("reference").select_and_pack(*inputs)
    assert batch.keep_lens.tolist() == [2, 2]  # K = 6: the four zero scores tie, and position goes before request
    for name, got, want in zip(batch._fields, batch, expected, strict=True):
        assert torch.equal(got, want), f"{name}: expected {want}, got {got}"
    serving = backends.explain().splitlines()[0]
    print(f"OK: dcut_kernels {dcut_kernels.__version__}, torch {torch.__version__}, {serving}")


if __name__ == "__main__":
    main()
