"""zerogap: reinforcement-learning post-training with engine and trainer equal to the last bit.

The only place for settings that must be in the environment before the first BLAS call of the process. Child
processes inherit them. `numerics.certify` verifies at start that they took effect, on the machine at hand.
"""

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
