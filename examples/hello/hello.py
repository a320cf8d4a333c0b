"""Print which process of the gang this is, and its accelerator."""

import os

process_id = os.environ["TPUFLEET_PROCESS_ID"]
num_processes = os.environ["TPUFLEET_NUM_PROCESSES"]
chips, accelerator = os.environ["TPUFLEET_CHIPS"], os.environ["TPUFLEET_ACCELERATOR"]
attempt = os.environ["TPUFLEET_ATTEMPT"]
hardware = f"{chips} chips of a {accelerator}"
print(f"process {process_id} of {num_processes} here, {hardware}, attempt {attempt}")
