"""The openai client in a loop: one agent answers, is told if the answer is wrong, and tries again. `pip install openai`"""

from openai import OpenAI

TRIES = 3


def run(problem, client):
    with OpenAI(base_url=client.base_url, api_key=client.api_key) as openai:
        messages = [{"role": "user", "content": problem.question}]
        for failures in range(TRIES):
            # The name of the model is that of the agent.
            reply = openai.chat.completions.create(model="solver", messages=messages, max_tokens=40)
            message = reply.choices[0].message
            if message.content.rpartition("Answer:")[2].strip() == problem.answer:
                return 1 - failures / TRIES  # the reward
            messages += [message, {"role": "user", "content": "Verdict: wrong fix"}]
    return 0
