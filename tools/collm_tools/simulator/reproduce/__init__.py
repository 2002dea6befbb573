"""The paper's figures that policy decides, from simulated days: runs, tables, pictures."""
