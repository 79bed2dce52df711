"""Program that asks an agent for sums from reasoning-gym, which also scores the answers. `pip install 'marsrl[reasoning_gym]'`"""

import zlib

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer


def run(problem, client):
    # crc32, because hash() differs between processes, so sessions of a group would not get the same sums.
    sums = reasoning_gym.create_dataset("chain_sum", size=1, seed=zlib.crc32(problem.id.encode()), max_terms=3)
    system = {"role": "system", "content": SYSTEM_PROMPTS["direct"]}
    reply = client.chat("solver", [system, sums[0]["question"]], max_tokens=64)
    return sums.score_answer(extract_answer(reply.text), sums[0])
