"""A small run directory of every format that was released: `python -m tests.formats.record` adds the present one."""
