"""DAPE V2 in JAX: attention scores treated as a feature map.

The shape legend, one for the whole package. A name carries its shape as a suffix (`scores_BHTS`), an einsum uses the
same letters, and the parameters of the model are named the same way, which is what `sharding.py` reads.

    B  batch                      T  query positions            S  key positions
    D  model width                H  heads                      K  width of one head
    F  feed-forward width         V  vocabulary                 L  layers (stacked parameters)
    C  hidden channels of the score convolution                 W  width of its kernel
    G  heads of keys and values         R  H / G, query heads that share one
    M  hidden width of FIRE's MLP       N  buckets of T5's bias         P  positions of CoPE's table

`axis` means a mesh axis, `dim` a tensor's. `scores` before the softmax, `probs` after, `bias` what is added. Units
stand in names: `nll_nats`, `num_tokens`, `warmup_steps`.

Reading order: positions, biases, contextual, processors, attention, transformer, sharding, data, training, evaluation.
"""
