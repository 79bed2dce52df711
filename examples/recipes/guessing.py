"""A game of several turns, which ends when it is won: the agent guesses the number that is the problem's answer."""

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec
from marsrl.rollout.types import Message

MOST_GUESSES = 4
RULES = "I think of a number from 0 to 9. Guess it; end with `Answer: N`."


class Guessing(Orchestration):
    """Game whose state is not stored: it is computed from the problem and the guesses."""

    agents = (AgentSpec("guesser"),)

    def follow(self, episode):
        asks = [episode.ask("guesser")]
        while len(asks) < MOST_GUESSES:
            guess = episode.said(asks[-1])
            if guess is None or guess.answer == episode.problem.answer:
                break
            asks.append(episode.ask("guesser", *(episode.said(ask) for ask in asks)))
        return asks

    def messages(self, episode, ask):
        chat = [Message("user", RULES)]
        for guess in episode.inputs(ask):
            chat += [Message("assistant", guess.shown), Message("user", self.reply(episode, guess.answer))]
        return chat

    def reply(self, episode, answer):
        if answer is None or not answer.isdecimal():
            return "That is no number. Guess again."
        return "Higher." if int(answer) < int(episode.problem.answer) else "Lower."

    def outcomes(self, episode):
        """Return the outcome of each guess, its reward with credit.reward_scheme=outcome.

        A game that the first guess wins gives 1, and each further guess costs 0.2. A lost game gives 0.
        """
        said = [sample for samples in episode.answers.values() for sample in samples]
        is_won = any(sample.answer == episode.problem.answer for sample in said)
        return {sample.uid: 1.2 - 0.2 * len(said) if is_won else 0.0 for sample in said}
