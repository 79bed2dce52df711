"""Settings of a run; settings of the rollout are in marsrl.rollout.config. Imports neither torch nor an engine."""

from marsrl.trainer.config.objective import CreditConfig, LossConfig, MptConfig
from marsrl.trainer.config.policy import LayoutConfig, OptimizerConfig, PolicyConfig
from marsrl.trainer.config.run_config import RunConfig
from marsrl.trainer.config.sections import SharedPrefixes, SyncBackend, WarmStartConfig

__all__ = [
    "CreditConfig",
    "LayoutConfig",
    "LossConfig",
    "MptConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RunConfig",
    "SharedPrefixes",
    "SyncBackend",
    "WarmStartConfig",
]
