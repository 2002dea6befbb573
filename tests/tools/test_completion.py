"""`collm completion`, in a real shell."""

from __future__ import annotations

import subprocess

import pytest

from collm_tools.cli import main


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["collm", "dr"], {"drain"}),
        (["collm", "adapter", "ro"], {"rollback"}),
        (["collm", "drain", "--wi"], {"--within"}),
    ],
)
def test_bash_completes_commands_and_options(
    words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that a shell does not take, or one of a command line of the past."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; complete -p collm >/dev/null || exit 1"
    function = '"$(complete -p collm | sed "s/.*-F \\([^ ]*\\).*/\\1/")"'
    ask = f'{line}; {function} collm "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=False, timeout=20)
    assert {word.strip() for word in done.stdout.split()} == expected, done.stderr
