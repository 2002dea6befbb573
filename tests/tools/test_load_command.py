"""`collm load` from the command line to its files, against a real HTTP service."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from collm_common.errors import CollmError
from collm_tools.cli import main, parser
from collm_tools.commands.load import arrivals, slo_of, write_json
from tests.support.broker import free_port
from tests.tools import cell


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["load", "--model", "m", *arguments])


async def test_a_run_writes_summary_records_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches results that are only on the screen."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "Q", "answer": "A"}\n')
    out, picture = tmp_path / "x" / "load.json", tmp_path / "y" / "load.png"
    async with TestServer(cell.Service().app()) as server:
        options = ["--url", str(server.make_url("")), "--rate", "40", "--duration", "0.5", "--slo-e2e", "5000"]
        files = ["--prompts", str(prompts), "--json", str(out), "--picture", str(picture)]
        assert await asyncio.to_thread(main, ["load", "--model", "m", *options, *files]) == 0
    found = json.loads(out.read_text())
    ask = found["summary"]["requests"]
    assert ask["offered"] == ask["completed"] == len(found["records"]) > 5
    assert found["summary"]["slo_attainment"] == 1.0
    assert found["summary"]["q_goodput"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "goodput" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["poisson", "gamma", "onoff"])
def test_scale_multiplies_the_rate_within_the_duration(kind: str) -> None:
    """Catches --scale that lengthens the run in place of filling it."""
    slow = arrivals(parsed("--arrivals", kind, "--rate", "5", "--duration", "100", "--cv", "1"))
    fast = arrivals(parsed("--arrivals", kind, "--rate", "5", "--duration", "100", "--cv", "1", "--scale", "4"))
    assert max(arrival.at_s for arrival in fast) <= 100
    assert len(fast) / len(slow) == pytest.approx(4, rel=0.3)


def test_a_scaled_trace_is_cut_after_scaling(tmp_path: Path) -> None:
    """Catches a duration counted in trace time."""
    path = tmp_path / "t.jsonl"
    rows = ({"timestamp": 1000 * n, "input_length": 1, "output_length": 1} for n in range(100))
    path.write_text("\n".join(map(json.dumps, rows)))
    assert len(arrivals(parsed("--trace", str(path), "--scale", "10", "--duration", "5"))) == 50
    assert len(arrivals(parsed("--trace", str(path)))) == 100


def test_limits_are_milliseconds_on_the_command_line() -> None:
    """Catches an SLO a thousand times too lax."""
    slo = slo_of(parsed("--slo-ttft", "200", "--slo-tpot", "50"))
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == (0.2, 0.05, None)


def test_an_unwritable_file_is_one_clear_error(tmp_path: Path) -> None:
    """Catches a traceback after a long run."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CollmError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})


def test_a_run_that_reached_nobody_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that goes on as if a service had been measured that was not there."""
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["load", "--model", "m", "--url", url, "--duration", "2", "--rate", "3"]) == 1
    assert "error" in capsys.readouterr().out


def test_the_script_is_the_same_command() -> None:
    """Catches scripts/load_generator.py going its own way."""
    done = subprocess.run(
        [sys.executable, "scripts/load_generator.py", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "usage: collm load" in done.stdout


def test_no_command_loads_torch_or_matplotlib() -> None:
    """Catches a heavy import in a tool that only talks HTTP."""
    code = (
        "import sys, collm_tools.cli; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
