"""Tests that take long, or many processes: they are collected by `make test-slow` only."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "HBONE_TEST_SLOW" in os.environ else ["*"]
