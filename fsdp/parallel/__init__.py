"""How a model is spread over ranks: sharding, materialization, communication hooks, float8, compilation,
recomputation, offload.
"""
