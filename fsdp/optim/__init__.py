"""Optimizers, Muon, schedules, gradient norms and clipping, loss scaling, non-finite steps, small optimizer
states, the moving average of the weights, TrainState.
"""
