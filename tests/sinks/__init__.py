"""Tests of the sinks, fed by real run directories."""
