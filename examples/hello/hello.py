"""Says which process of the gang this is, and where it runs."""

import os

me, all_of_us = os.environ["TPUFLEET_PROCESS_ID"], os.environ["TPUFLEET_NUM_PROCESSES"]
chips, accelerator = os.environ["TPUFLEET_CHIPS"], os.environ["TPUFLEET_ACCELERATOR"]
attempt = os.environ["TPUFLEET_ATTEMPT"]
print(f"process {me} of {all_of_us} here, with {chips} chips of a {accelerator}, attempt {attempt}")
