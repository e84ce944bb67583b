"""The first page of the documentation for vLLM."""

from __future__ import annotations

import shutil

import pytest
from support import start


@pytest.mark.once
def test_the_page_for_vllm(tmp_path):
    if shutil.disk_usage("/dev/shm").total < 4 << 30:
        pytest.skip("the CPU tier of the first page takes 4 GiB of /dev/shm")
    start.doctor_says_what_the_page_does("vllm", "transfer.json", tmp_path)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = make_arg_parser(FlexibleArgumentParser()).parse_args(start.server_arguments("vllm", tmp_path))
    assert given.kv_transfer_config.kv_connector == "LarderOffloadingConnector"
