"""Replay of recorded speculative steps through the public op: ``python -m dcut_kernels demo``.

``recordings`` serves the recorded drafts step by step, ``policies`` says what each policy asks of the op, ``replay``
runs the op and reads what was accepted from the packed batch, ``report`` turns that into numbers, and ``draw``,
``plots`` and ``run`` show them.
"""
