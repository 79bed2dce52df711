"""The library verifiers in a separate process: harness VERIFIERS_HARNESS plays environment VERIFIERS_ID.

The default harness is `null`. It starts a program, which requests answers through the session's URL and key.
`pip install verifiers==0.4.0 uv==0.13.9`
"""

import asyncio
import json
import os
import random
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment

# verifiers finds uv on PATH, and uv installs the packages of the harness's program.
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
endpoint = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
problem = json.load(sys.stdin)  # its id selects the task, as in verifiers_env.py
seat = {"harness": {"id": os.environ.get("VERIFIERS_HARNESS", "null")}, "runtime": {"type": "subprocess"}}
taskset = {"id": os.environ.get("VERIFIERS_ID", "chains")}
env = load_environment(vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": seat}))
own = [task for i, task in enumerate(env.taskset) if (i % 10 == 0) == (problem["purpose"] != "train")]
task = random.Random(problem["id"]).choice(own)


async def play():
    async with env.serving():
        (slot,) = env.slots(task)
        return await env.run_slot(slot, vf.ModelContext("solver", endpoint))


episode = asyncio.run(play())
if not episode.ok:
    sys.exit(str([*episode.errors, *(trace.errors for trace in episode.traces)]))
print(episode.traces[0].reward)
