"""OpenEnv server on which every session plays its own game of guessing a number. `pip install openenv-core==0.3.0`

python openenv_server.py [PORT]        default: 8000
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Heard(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, **more):
        self.number, self.tries = random.Random(seed).randrange(10), 0
        return Heard(text="Guess my number, from 0 to 9.")

    def step(self, action, **more):
        self.tries += 1
        guess = action.message.strip()
        is_right = guess == str(self.number)
        said = "Right." if is_right else "A digit, please." if guess not in set("0123456789") else f"Not {guess}."
        return Heard(text=said, reward=float(is_right), done=is_right or self.tries == 3)


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Heard, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]) if sys.argv[1:] else 8000, log_level="warning")
