"""The settings of a run. Import-light: neither torch nor an engine; what steers the rollout is in marsrl.rollout.config."""

from marsrl.trainer.config.objective import CreditConfig, LossConfig, MptConfig
from marsrl.trainer.config.policy import LayoutConfig, OptimizerConfig, PolicyConfig, PriceConfig
from marsrl.trainer.config.run_config import RunConfig
from marsrl.trainer.config.sections import SyncBackend, WarmStartConfig

__all__ = [
    "CreditConfig",
    "LayoutConfig",
    "LossConfig",
    "MptConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PriceConfig",
    "RunConfig",
    "SyncBackend",
    "WarmStartConfig",
]
