"""Every operator schema, once, and the limits that all backends share.

The same operators are defined in several namespaces: ``dcut`` is the public one, bound to one backend per device;
``dcut_<backend>`` reaches one backend whatever the device.  Argument and result order is fixed here and nowhere else:
the compiled library reads its stack in this order.
"""

from __future__ import annotations

import torch

MAX_DRAFT_LEN = 63
MAX_BUCKETS = 256
MAX_TOKENS_CPU = 1 << 24
MAX_BATCH_LAUNCH = 4096  # requests of one GPU launch
MAX_DRAFTS_LAUNCH = 1 << 16  # batch * draft tokens of one GPU launch

_ROWS = """Tensor? draft_lens=None, Tensor? min_keep=None, Tensor? max_keep=None, Tensor? weight=None"""
_POLICY = """Tensor? budget=None, {calibration}Tensor? envelope=None, Tensor(next!)? next_budget=None,
    Tensor(host!)? host_budget=None, bool count_bonus=True"""
_SELECT = f"""Tensor confidence, Tensor draft_ids, Tensor bonus_ids, Tensor seq_lens, Tensor budgets, Tensor costs, *,
    {_ROWS}, Tensor? row_index=None, Tensor? base_lens=None, Tensor? num_reqs=None,
    Tensor? block_table=None, SymInt block_size=0, str score="inclusive", str policy="argmax",
    {_POLICY.format(calibration="Tensor? calibration=None, ")}, bool log_confidence=False, int pad_token=0,
    SymInt? capacity=None"""

OUTPUTS = (
    "keep_lens",
    "cu_seqlens",
    "kv_lens",
    "token_ids",
    "positions",
    "request_ids",
    "slot_mapping",
    "draft_index",
    "logits_indices",
    "decision",
    "gains",
)
_RESULTS = "(" + ", ".join(f"Tensor {name}" for name in OUTPUTS) + ")"
_OUT = ", ".join(f"Tensor({name}!) {name}" for name in OUTPUTS)

_SCHEMAS = {
    "select_and_pack": f"({_SELECT}) -> {_RESULTS}",
    "select_and_pack.out": f"({_SELECT}, {_OUT}) -> ()",
    "log_prefix_sum": """(Tensor confidence, *, Tensor? row_index=None, str score="inclusive",
        Tensor? calibration=None, bool log_confidence=False) -> Tensor""",
    "segmented_topk": f"""(Tensor prefix, Tensor budgets, *, {_ROWS}, Tensor? base_lens=None, Tensor? num_reqs=None,
        SymInt? capacity=None) -> Tensor""",
    "bucket_argmax": f"""(Tensor prefix, Tensor budgets, Tensor costs, *, {_ROWS}, Tensor? base_lens=None,
        Tensor? num_reqs=None, str policy="argmax", {_POLICY.format(calibration="")}, SymInt? capacity=None)
        -> (Tensor decision, Tensor gains)""",
    "pack_prefixes": f"""(Tensor keep_lens, Tensor draft_ids, Tensor bonus_ids, Tensor seq_lens, *,
        Tensor? row_index=None, Tensor? base_lens=None, Tensor? num_reqs=None, Tensor? block_table=None,
        SymInt block_size=0, int pad_token=0, SymInt? capacity=None) -> {_RESULTS}""",
    "draft_confidence": """(Tensor logits, *, Tensor? temperature=None, Tensor? draft_ids=None, str[] statistics)
        -> (Tensor draft_ids, Tensor values)""",
}

STATISTICS = ("log_prob", "max_prob", "collision", "margin")
SCHEMAS = {name: " ".join(schema.split()) for name, schema in _SCHEMAS.items()}
NAMESPACES = ("dcut", "dcut_cpu", "dcut_cuda", "dcut_triton", "dcut_simt", "dcut_reference")


def parse(name: str) -> torch._C.FunctionSchema:
    """The parsed schema of an operator."""
    return torch._C.parse_schema(name.split(".")[0] + SCHEMAS[name])


def define(namespace: str) -> torch.library.Library:
    """Define every operator in one namespace and return the library that keeps the definitions alive."""
    library = torch.library.Library(namespace, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("draft_confidence", torch.library.fallthrough_kernel, "Autograd")  # floats without a gradient
    return library
