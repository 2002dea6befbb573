"""`python -m collm_replica.schema_trial CPU_S BYTES`: compile the schema on stdin; killed beyond the limits."""

from __future__ import annotations

import resource
import sys


def main() -> None:
    """Exit status 0 even if the schema is wrong. The tokens are bytes: what takes long does not depend on them."""
    cpu_s, size = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    schema = sys.stdin.read()
    try:
        import llguidance
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    except ValueError:
        return


if __name__ == "__main__":
    main()
