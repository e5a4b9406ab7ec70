"""Before torch loads: several threads want MKL's conditional numerical reproducibility.

Without it MKL's FP32 bits follow where a thread's scratch memory lies, and two equal copies in one call differ.
"""

import os

THREADS = int(os.environ.get("TEST_THREADS", "1"))  # of the decoders in the test process; see .ci/run
if THREADS > 1:
    os.environ.setdefault("MKL_CBWR", "AUTO")
