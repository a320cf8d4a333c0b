"""Last lines of programs that failed, as JAX, XLA, libtpu, Python and pip write them, with the
reason that a person would give. None: nothing but the program itself is to blame."""

from __future__ import annotations

from dataclasses import dataclass

from tpufleet.model.job.end_reasons import EndReason

HBM = EndReason.OUT_OF_HBM
RAM = EndReason.OUT_OF_HOST_MEMORY
DISK = EndReason.DISK_FULL
BUSY = EndReason.DEVICE_BUSY
LOST = EndReason.CONNECTION_LOST


@dataclass(frozen=True)
class Tail:
    name: str
    expected: EndReason | None
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.strip("\n").split("\n")


FRAMES = """Traceback (most recent call last):
  File "/job/train.py", line 212, in <module>
    main(sys.argv[1:])
  File "/job/train.py", line 187, in main
    state, metrics = train_step(state, batch)
"""
USER_FRAMES = """Traceback (most recent call last):
  File "/job/train.py", line 40, in <module>
    cfg = load(sys.argv[1])
"""
FILTERED = """--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception. \
Set JAX_TRACEBACK_FILTERING=off to include these.
"""
FATAL = (
    "F0405 12:00:01.120944   20514 client.h:77] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died; see the "
    "other task logs for more details. Disable Python buffering, i.e. `python -u`, to be sure to "
    "see all the previous output. "
)
SHUTDOWN_NOISE = """\
E0405 12:03:17.500000    8123 coordination_service_agent.cc:711] Failed to disconnect from \
coordination service with status: DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::1234
Proceeding with agent shutdown anyway.
"""

TAILS: tuple[Tail, ...] = (
    # Device memory.
    Tail("hbm reserve", HBM, FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Attempting to reserve 10.55G at the \
bottom of memory. That was not possible. There are 9.99G free, 0B reserved, and 9.99G reservable.
"""),
    Tail("hbm compile", HBM, FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran \
out of memory in memory space hbm. Used 19.51G of 15.48G hbm. Exceeded hbm capacity by 4.03G.

Total hbm usage >= 19.99G:
    reserved        530.00M
    program          19.51G

Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_name="jit(train_step)/transpose(jvp(Block))/dot_general"
     Allocation type: HLO temp
     ==========================
""" + FILTERED),
    Tail("hbm dump without its head", HBM, """\
  7. Size: 512.00M
     Operator: op_name="jit(train_step)/jvp(Attention)/add"
     Shape: bf16[16,2048,8192]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 512.00M
     Allocation type: HLO temp
     ==========================
"""),
    Tail("hbm buffer", HBM, FRAMES + """\
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to \
allocate 2.00G. That was not possible. There are 1.20G free.; (0x0x0_HBM0)
"""),
    Tail("hbm loading a program", HBM, FRAMES + """\
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Error loading program 'jit_train_step': \
Attempting to reserve 12.34G at the bottom of memory. That was not possible.
"""),
    Tail("hbm older message", HBM, FRAMES + """\
RuntimeError: Resource exhausted
The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 190, in main
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB \
(2147483648B) on device ordinal 0
"""),
    Tail("hbm gpu", HBM, FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate \
12884901888 bytes.
"""),
    Tail("hbm, then the exit is noisy", HBM, FRAMES + """\
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to \
allocate 8.00G. That was not possible. There are 7.20G free.; (1x0x0_HBM0)
""" + SHUTDOWN_NOISE),
    Tail("hbm wrapped by the program", HBM, FRAMES + """\
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of \
memory in memory space hbm. Used 17.92G of 15.75G hbm.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 230, in <module>
    raise TrainingFailed("step 0") from error
TrainingFailed: step 0
"""),
    # Host memory.
    Tail("numpy", RAM, FRAMES + """\
numpy._core._exceptions._ArrayMemoryError: Unable to allocate 745. GiB for an array with shape \
(100000, 1000000) and data type float64
"""),
    Tail("numpy 1", RAM, FRAMES + """\
numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array
"""),
    Tail("python", RAM, FRAMES + "MemoryError\n"),
    Tail("c++", RAM, """\
terminate called after throwing an instance of 'std::bad_alloc'
  what():  std::bad_alloc
Fatal Python error: Aborted

Thread 0x00007f3a4c7fe700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
"""),
    Tail("fork", RAM, FRAMES + "OSError: [Errno 12] Cannot allocate memory\n"),
    Tail("arrow", RAM, FRAMES + "pyarrow.lib.ArrowMemoryError: malloc of size 1288490188 failed\n"),
    Tail("torch on the host", RAM, FRAMES + """\
RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: \
you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)
"""),
    Tail("xla on cpu", RAM, FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 \
bytes.
"""),
    # Disk.
    Tail("python write", DISK, FRAMES + """\
OSError: [Errno 28] No space left on device: '/tmp/data/shard-00012.arrow'
"""),
    Tail("tensorstore", DISK, FRAMES + """\
ValueError: RESOURCE_EXHAUSTED: Error writing local file "/ckpt/400/params/c/0.0": Failed to \
write file [OS error 28: ENOSPC No space left on device]
"""),
    Tail("pip", DISK, """\
Collecting jaxlib
  Downloading jaxlib-0.4.38-cp311-cp311-manylinux2014_x86_64.whl (101.7 MB)
ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device
"""),
    Tail("quota", DISK, FRAMES + "OSError: [Errno 122] Disk quota exceeded: '/home/ada/run.log'\n"),
    Tail("sqlite", DISK, FRAMES + "sqlite3.OperationalError: database or disk is full\n"),
    Tail("a shell tool", DISK, """\
tar: shard-0007/tokens.bin: Wrote only 4096 of 10240 bytes
tar: shard-0008: Cannot mkdir: No space left on device
tar: Exiting with failure status due to previous errors
"""),
    # The device.
    Tail("in use by a pid", BUSY, USER_FRAMES + """\
RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process \
with pid 20514. Not attempting to load libtpu.so in this process. (set JAX_PLATFORMS='' to \
automatically choose an available backend)
"""),
    Tail("lockfile", BUSY, USER_FRAMES + """\
RuntimeError: Unable to initialize backend 'tpu': ABORTED: Internal error when accessing libtpu \
multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile". (set JAX_PLATFORMS='')
"""),
    Tail("libtpu in use", BUSY, """\
E1115 09:12:44.000121   91 tpu_initializer_helper.cc:100] libtpu.so already in use by another \
process. Run "$ sudo lsof -w /dev/accel0" to figure out which process is using the TPU.
Fatal: no devices
"""),
    Tail("vfio", BUSY, USER_FRAMES + """\
RuntimeError: Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed: \
open(/dev/vfio/0): Device or resource busy: Device or resource busy; Couldn't open iommu group
"""),
    Tail("accel", BUSY, USER_FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: UNKNOWN: TPU initialization failed: open(/dev/accel0): \
Operation not permitted: Operation not permitted; Couldn't open device: /dev/accel0
"""),
    Tail("another user's logs", BUSY, """\
Could not open any log file.
https://symbolize.stripped_domain/r/?trace=7f1c2e&map=
"""),
    # Connections.
    Tail("another task died", LOST, """\
step 4110 loss 2.310
E0405 12:00:01.113200   20514 coordination_service_agent.cc:332] Polled an error from \
coordination service (this can be an error from this or another task).
""" + FATAL + """\
absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
/job:jax_worker/replica:0/task:2
Fatal Python error: Aborted
"""),
    Tail("heartbeat of a task", LOST, """\
2026-04-05 12:00:01.113200: E external/xla/xla/tsl/distributed_runtime/coordination/\
coordination_service.cc:535] /job:jax_worker/replica:0/task:3 heartbeat timeout. This indicates \
that the remote task has failed, got preempted, or crashed unexpectedly.
"""),
    Tail("leader gone", LOST, FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: UNAVAILABLE: failed to connect to all addresses; last \
error: UNKNOWN: ipv4:10.128.0.5:8476: Failed to connect to remote host: Connection refused
"""),
    Tail("barrier at start", LOST, USER_FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: \
[Init]Wait_for_all_tasks_to_register::0. This usually happens because a task triggered the \
barrier too early or too slowly.
"""),
    Tail("socket closed", LOST, FRAMES + """\
jax.errors.JaxRuntimeError: UNAVAILABLE: Socket closed
Additional GRPC error information from remote target coordination_service while calling \
/tensorflow.CoordinationService/Barrier:
"""),
    Tail("gloo reduce", LOST, FRAMES + """\
jax.errors.JaxRuntimeError: FAILED_PRECONDITION: Buffer Definition Event: Gloo all-reduce \
failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5842
"""),
    Tail("gloo reset", LOST, FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: UNKNOWN: Gloo allgather failed: \
[external/gloo/gloo/transport/tcp/pair.cc:534] Read error [10.0.0.4]:3312: Connection reset by peer
"""),
    Tail("gloo mesh", LOST, USER_FRAMES + """\
jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Gloo context initialization failed: \
[external/gloo/gloo/transport/tcp/device.cc:211] Connect timeout [10.0.0.4]
"""),
    Tail("python grpc", LOST, FRAMES + """\
grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with:
\tstatus = StatusCode.UNAVAILABLE
\tdetails = "Socket closed"
\tdebug_error_string = "UNKNOWN:Error received from peer {grpc_status:14}"
>
"""),
    Tail("the old message", LOST, "[host 3] GRPC error: transport is closing\nexiting\n"),
    Tail("the old message, other case", LOST, "gRPC Error 14 from 10.0.0.9:8471\n"),
    Tail("ranks before lines", LOST, "\n".join(
        f"[rank3]: {line}" for line in (FRAMES + """\
jax.errors.JaxRuntimeError: UNAVAILABLE: Connection reset by peer""").split("\n")
    )),
    Tail("handled trouble, then death", LOST, """\
Traceback (most recent call last):
  File "/job/data.py", line 9, in fetch
    return open(path)
FileNotFoundError: [Errno 2] No such file or directory: '/data/cache'
no cache; reading from the bucket
step 10 loss 4.2
""" + FATAL + "absl::Status: UNAVAILABLE: Task 1 is unhealthy\n"),
    # The program itself.
    Tail("value error", None, USER_FRAMES + "ValueError: batch 17 is not divisible by 4 hosts\n"),
    Tail("stock", None, USER_FRAMES + """\
ValueError: unknown status 'UNAVAILABLE: backorder' of product 4711
"""),
    Tail("stock, unquoted", None, USER_FRAMES + """\
KeyError: no price for an UNAVAILABLE: product
"""),
    Tail("a column called so", None, USER_FRAMES + """\
KeyError: "column 'GRPC error' is not in the table"
"""),
    Tail("source line quotes it", None, """\
Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    raise SystemError("no " + names["GRPC error"])
SystemError: no such thing
"""),
    Tail("catches memory errors", None, """\
Traceback (most recent call last):
  File "/job/train.py", line 31, in <module>
    except MemoryError:
NameError: name 'retry' is not defined
"""),
    Tail("recovered before", None, """\
INFO data: GRPC error from the feature server, retrying (1/5)
INFO data: ok after 2 tries
step 40 loss 3.1
""" + USER_FRAMES + "AssertionError: loss is nan\n"),
    Tail("healthy line, then exit 1", None, """\
INFO:root:tests of error handling: simulated 'UNAVAILABLE: Socket closed' passed
validation failed: accuracy 0.31 is below 0.5
"""),
    Tail("config error without traceback", None, """\
usage: train.py [-h] [--lr LR]
train.py: error: unrecognized arguments: --learning-rate
"""),
    Tail("own failure, noisy exit", None, USER_FRAMES + """\
ZeroDivisionError: division by zero
E0405 12:03:17.500000    8123 coordination_service_agent.cc:711] Failed to disconnect from \
coordination service with status: DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::1234
"""),
    Tail("own failure, then the runtime gives up", None, USER_FRAMES + """\
jax.errors.ConcretizationTypeError: Abstract tracer value encountered
""" + FILTERED + FATAL + "absl::Status: UNAVAILABLE: Task 3 is unhealthy\n"),
    Tail("own failure, then atexit fails too", None, USER_FRAMES + """\
KeyError: 'labels'
Exception ignored in atexit callback: <function clean_up at 0x7f1c2e>
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/jax/_src/distributed.py", line 170, in shutdown
jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown
"""),
    Tail("own failure, then a tracker says goodbye", None, USER_FRAMES + """\
RuntimeError: loss diverged at step 300
wandb: View run quiet-lake-7 at: http://tracker.example/runs/1
wandb: Synced 5 files, 0 errors
E0405 12:03:17.500000    8123 coordination_service_agent.cc:711] Failed to disconnect from \
coordination service with status: UNAVAILABLE: Socket closed
"""),
    Tail("heartbeat of a patient", None, USER_FRAMES + """\
ValueError: heartbeat timeout must be positive
"""),
    Tail("disk warning before", None, """\
WARNING cache: No space left on device, caching is off
""" + USER_FRAMES + "TypeError: unsupported operand type(s) for +: 'int' and 'str'\n"),
    Tail("pip resolver", None, """\
ERROR: pip's dependency resolver does not currently take into account all the packages that are \
installed. This behaviour is the source of the following dependency conflicts.
tensorflow 2.15 requires protobuf<5, but you have protobuf 5.29 which is incompatible.
ModuleNotFoundError: No module named 'flax'
"""),
    Tail("pip retries", None, """\
WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by \
'NewConnectionError: Failed to establish a new connection: [Errno 111] Connection refused'
ERROR: Could not find a version that satisfies the requirement flaxx (from versions: none)
ERROR: No matching distribution found for flaxx
"""),
    Tail("protobuf grumbles", None, """\
AttributeError: 'MessageFactory' object has no attribute 'GetPrototype'
""" + USER_FRAMES + "FileNotFoundError: [Errno 2] No such file or directory: 'config.yaml'\n"),
    Tail("a service of the user's", None, USER_FRAMES + """\
redis.exceptions.ConnectionError: Error 111 connecting to localhost:6379. Connection refused.
"""),
    Tail("message too large", None, FRAMES + """\
grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with:
\tstatus = StatusCode.RESOURCE_EXHAUSTED
\tdetails = "Received message larger than max (8388608 vs. 4194304)"
>
"""),
    Tail("quota of an api", None, FRAMES + """\
google.api_core.exceptions.ResourceExhausted: 429 RESOURCE_EXHAUSTED: Quota exceeded for \
quota metric 'Read requests'
"""),
    Tail("vmem", None, FRAMES + """\
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used \
20.00M of 16.00M vmem. Exceeded vmem capacity by 4.00M.
"""),
    Tail("a big allocation that worked", None, """\
tcmalloc: large alloc 17179869184 bytes == 0x5581c4000000 @  0x7f6a
W0405 11:59:01.000000    912 hlo_rematerialization.cc:2948] Can't reduce memory use below 12GiB
""" + USER_FRAMES + "IndexError: list index out of range\n"),
    Tail("allocation types of one's own", None, USER_FRAMES + """\
ValueError: Allocation type must be 'static' or 'dynamic'
"""),
    Tail("nothing", None, ""),
)  # fmt: skip
