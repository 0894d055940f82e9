"""Spreads a model over ranks: sharding, materialization, communication hooks, float8, compilation,
recomputation, offload.
"""
