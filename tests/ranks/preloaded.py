"""Imports that jobs of two ranks need: the learner, and megatron with the CPU's shim."""

import importlib

from marsrl.trainer.learner.megatron import shim

shim.install()  # before anything imports megatron
for name in ("checkpoint_store", "convert", "head", "model", "optimizer", "passes", "router_replay"):
    importlib.import_module(f"marsrl.trainer.learner.megatron.{name}")
importlib.import_module("marsrl.trainer.learner.learner")
