"""Optimizers, schedules, gradient norms and clipping, loss scaling, non-finite steps, small optimizer states,
TrainState.
"""
