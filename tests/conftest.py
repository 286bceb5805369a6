"""What holds for every test: how many examples hypothesis tries.

HYPOTHESIS_PROFILE=deep tries 20,000 instead of 50 each, which takes minutes. No profile has a deadline: a
busy machine is no reason to fail.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fast", max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
