"""The plugin for Axolotl, as its plugin manager uses it."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from hosts.interfaces import BasePlugin, adapter
from lowtide.errors import LowtideError, UnitError
from lowtide.hosts.transformers import Budget

pytest.importorskip("pydantic")


def test_the_plugin_adds_the_callback() -> None:
    with adapter("axolotl") as host:
        plugin = host.LowtidePlugin()
        assert isinstance(plugin, BasePlugin)
        module, _, name = plugin.get_input_args().rpartition(".")
        keys = getattr(importlib.import_module(module), name).model_fields
        assert {"lowtide_budget", "lowtide_largest", "lowtide_probe"} <= keys.keys()
        cfg = SimpleNamespace(lowtide_budget="20GiB", lowtide_probe=8, gradient_checkpointing=True)
        plugin.pre_model_load(cfg)
        (callback,) = plugin.add_callbacks_post_trainer(cfg, None)
        assert isinstance(callback, Budget) and callback.budget == "20GiB"
        (callback,) = plugin.add_callbacks_post_trainer(SimpleNamespace(), None)  # the plugin's line alone
        assert callback.budget == "90%"


def test_wrong_settings_are_refused_before_the_model_is_loaded() -> None:
    with adapter("axolotl") as host:
        plugin = host.LowtidePlugin()
        with pytest.raises(UnitError, match="20 apples"):
            plugin.pre_model_load(SimpleNamespace(lowtide_budget="20 apples"))
        with pytest.raises(UnitError, match="lots"):
            plugin.pre_model_load(SimpleNamespace(lowtide_host="lots"))
        with pytest.raises(ValueError, match="probe is a number of batches"):
            plugin.pre_model_load(SimpleNamespace(lowtide_probe=-1))
        for key, value in {"gradient_checkpointing": "offload", "activation_offloading": True}.items():
            with pytest.raises(LowtideError, match=f"{key} moves activations a second time: leave it out"):
                plugin.pre_model_load(SimpleNamespace(**{key: value}))
