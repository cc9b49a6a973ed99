"""`LowtidePlugin`: a plugin for Axolotl, named in its YAML file.

    plugins: [lowtide.hosts.axolotl.LowtidePlugin]
    lowtide_budget: 20GiB

The plugin adds the callback for transformers' `Trainer` (`lowtide.hosts.transformers.Budget`) to the trainer that
Axolotl makes, and training then runs as described there. Set `gradient_checkpointing: false`; `true` is switched off,
with a message.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from lowtide.errors import LowtideError
from lowtide.hosts.transformers import Budget


class LowtideArgs(BaseModel):
    """The keys of the YAML file, named as the options of `Budget`. The budget is in bytes, or a share of the device."""

    lowtide_budget: int | str = "90%"
    lowtide_largest: int | None = None
    lowtide_probe: int = 0
    lowtide_host: int | str = 0
    lowtide_tune_s: float = 10.0


class LowtidePlugin(BasePlugin):
    """Trains within `lowtide_budget`."""

    def get_input_args(self) -> str:
        """The class of the YAML keys."""
        return "lowtide.hosts.axolotl.LowtideArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Check the settings before a model is loaded, which may take minutes."""
        self._callback(cfg)
        offloads = [key for key in ("activation_offloading", "layer_offloading") if getattr(cfg, key, None)]
        if getattr(cfg, "gradient_checkpointing", None) in ("offload", "offload_disk"):
            offloads.append("gradient_checkpointing")
        if offloads:
            raise LowtideError(
                f"{offloads[0]} moves activations a second time: leave it out, and set lowtide_host: 64GiB to let the "
                "plan offload"
            )

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callback that plans when training begins."""
        return [self._callback(cfg)]

    def _callback(self, cfg: Any) -> Budget:
        given = {name: getattr(cfg, name, None) for name in LowtideArgs.model_fields}
        settings = LowtideArgs(**{name: value for name, value in given.items() if value is not None})
        return Budget(**{name.removeprefix("lowtide_"): value for name, value in settings})
