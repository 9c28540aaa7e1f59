"""``python -m dcut_kernels demo``: a real drafter and target, live, or the replay of recorded drafts.

``live`` decodes with `dcut_kernels.engine`: ``measure`` runs the policies, ``report`` turns their steps into numbers,
``draw`` and ``plots`` show them, ``stream`` shows one text as it grows.

``--replay``: ``recordings`` serves the recorded drafts step by step, ``policies`` says what each policy asks of the op,
``replay`` runs the op and reads what was accepted from the packed batch, ``report`` turns that into numbers, and
``draw``, ``plots`` and ``run`` show them.
"""
