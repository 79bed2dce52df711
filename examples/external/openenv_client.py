"""Environment in which an agent plays on an OpenEnv server, by texts. `pip install openenv-core==0.3.0`"""

import os
import zlib

from openenv.core import GenericEnvClient


class Play:
    max_tokens = 16  # maximum tokens of a turn

    def reset(self, problem):
        self.server = GenericEnvClient(os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")).sync()
        self.reward = 0.0
        return self.server.reset(seed=zlib.crc32(problem.id.encode())).observation["text"]

    def step(self, text):
        result = self.server.step({"message": text})
        self.reward += result.reward or 0.0
        return self.reward if result.done else result.observation["text"]

    def close(self):
        self.server.close()
