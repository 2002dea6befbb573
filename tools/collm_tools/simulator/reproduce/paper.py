"""What the paper reports, for the column beside ours."""

GOODPUT_AT_4X = {
    "code": {"dLoRA": 1.16, "Shepherd": 1.25, "PEFT": 1.37},
    "conv": {"dLoRA": 1.10, "Shepherd": 1.15, "PEFT": 1.51},
}
"""CoLLM's goodput over a baseline's at scale 4 (figure 10)."""

Q_GOODPUT_OVER_PEFT = {1.0: 1.68, 3.0: 2.2}
"""On conversations, up to (figure 10d)."""

DIP_ACTIVITY = {"CoLLM": "> 70 %", "baselines": "< 45 %"}
"""SM utilisation between minutes 400 and 500 at scale 3 (figure 11a)."""

BETTER_THAN_ONE = {"CoLLM": "> 80 %", "separate": "about 40 %", "none": "< 10 %"}
"""Share of answers of quality above 1 (figure 12a)."""

COMPLETION = {"(4, 16)": "1.58", "(16, 4)": "1.63", "coordinator": "1"}
"""Joint completion time over the coordinator's (figure 12b)."""

TRAINING_SHARE = {1.0: "about 30 %", 4.0: "0 %"}
"""Of processing time (figure 14)."""

OVERHEAD = "< 2 % on average, < 5 % at most"
"""Of processing time, dispatcher's pacing and coordinator's optimisation (figure 14)."""
