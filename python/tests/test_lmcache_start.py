"""The first page of the documentation for LMCache."""

from __future__ import annotations

import argparse

from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.multiprocess.config import add_mp_server_args
from support import start
from support.lmcache import PluginL2AdapterConfig


def test_the_page_for_lmcache(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(100))
    start.doctor_says_what_the_page_does("lmcache", "l2.json", tmp_path, ("/models/llama-3.1-8b", str(model)))
    parser = argparse.ArgumentParser()
    add_storage_manager_args(parser)
    add_mp_server_args(parser)
    given = parse_args_to_config(parser.parse_args(start.server_arguments("lmcache", tmp_path)))
    (adapter,) = given.l2_adapter_config.adapters
    assert isinstance(adapter, PluginL2AdapterConfig) and adapter.module_path == "larder_kv.lmcache"
