"""Activation extraction: run a decoder over samples and store its activations, exactly once.

plans: what is extracted. model/: the decoder in JAX. inputs/: samples and tokens. io/: storage,
shards, datasets. pipeline/: planning and running. fleet: many workers as jobs. cli/: `tpu extract`.
"""
