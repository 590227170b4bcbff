"""What holds for every test: JAX's settings and the hypothesis profiles.

Set in the environment before JAX is imported, so that commands started by a test inherit them.
"""

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"

settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile("ci")
