"""Teaches an actor and a critic to balance a pole on a cart; the game is written in JAX, in this file.

Many carts run at a time. After some steps of each, the trainer updates one network with two outputs, by advantage
actor-critic: Mnih et al., "Asynchronous methods for deep reinforcement learning", https://arxiv.org/abs/1602.01783. The
game is that of Barto et al., "Neuronlike adaptive elements that can solve difficult learning control problems", 1983,
with the numbers of Gymnasium's CartPole-v1: a step is worth 1, and a game ends where the pole falls or after 500 steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import trainer

CARTS, STEPS, UPDATES = 64, 32, 400
DISCOUNT, REWARD = 0.99, 0.1  # so that values are no large numbers, which the critic learns slowly
LONGEST = 500


class ActorCritic(nn.Module):
    """The logits of the two actions, and the value of a state."""

    @nn.compact
    def __call__(self, state: jax.Array) -> dict[str, jax.Array]:
        hidden = nn.tanh(nn.Dense(64)(state))
        return {"actor": nn.Dense(2)(nn.tanh(nn.Dense(64)(hidden))), "critic": nn.Dense(1)(hidden)[..., 0]}


def after(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a fiftieth of a second, in which the cart is pushed to a side, and whether it is lost.

    Args:
      state: of one cart: position, speed, angle of the pole, and its speed.
      action: 0 pushes to the left, 1 to the right.
    """
    _, x_speed, angle, angle_speed = state
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * angle_speed ** 2 * sine) / 1.1
    angle_change = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine ** 2 / 1.1))
    x_change = push - 0.05 * angle_change * cosine / 1.1
    state = state + 0.02 * jnp.array([x_speed, x_change, angle_speed, angle_change])
    return state, (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > jnp.pi / 15)


class Learner(trainer.Model):
    """Rows are states; targets are their actions, advantages and returns."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> jax.Array:
        log_probabilities = nn.log_softmax(y_pred["actor"])
        chosen = jnp.take_along_axis(log_probabilities, y["action"][:, None], -1)[:, 0]
        entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1)
        critic = jnp.square(y_pred["critic"] - y["value"])
        return (0.5 * critic - chosen * y["advantage"] - 0.01 * entropy).mean()


def new_games(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns states of carts that stand nearly still, and how many steps they have made."""
    return jax.random.uniform(key, (CARTS, 4), minval=-0.05, maxval=0.05), jnp.zeros(CARTS, jnp.int32)


def play(params: Any, games: Any, key: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns the games after a step of each, with new games for those that ended, and the observations."""
    states, steps = games
    action_key, reset_key = jax.random.split(key)
    outputs = ActorCritic().apply({"params": params}, states)
    actions = jax.random.categorical(action_key, outputs["actor"])
    moved, is_lost = jax.vmap(after)(states, actions)
    has_ended = is_lost | (steps + 1 >= LONGEST)
    fresh, zeros = new_games(reset_key)
    games = jnp.where(has_ended[:, None], fresh, moved), jnp.where(has_ended, zeros, steps + 1)
    return games, (states, actions, outputs["critic"], has_ended)


@jax.jit
def experience(params: Any, games: Any, key: jax.Array) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """Returns the games after some steps, and the rows that these give to learn from."""
    keys = jax.random.split(key, STEPS)
    games, (states, actions, values, has_ended) = jax.lax.scan(
        lambda games, key: play(params, games, key), games, keys)

    def backward(value: jax.Array, ended: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = REWARD + DISCOUNT * jnp.where(ended, 0, value)
        return value, value

    last = ActorCritic().apply({"params": params}, games[0])["critic"]
    _, found = jax.lax.scan(backward, last, has_ended, reverse=True)
    advantage = found - values
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    targets = {"action": actions, "advantage": advantage, "value": found}
    return games, states.reshape(-1, 4), jax.tree.map(jnp.ravel, targets)


@jax.jit
def mean_return(params: Any, key: jax.Array) -> jax.Array:
    """Returns how many steps the games of some carts last on average."""
    game_key, key = jax.random.split(key)
    _, (_, _, _, has_ended) = jax.lax.scan(
        lambda games, key: play(params, games, key), new_games(game_key), jax.random.split(key, LONGEST))
    return (1 + has_ended.argmax(0)).mean()


def main() -> None:
    model = Learner(ActorCritic())
    model.compile(trainer.optimizers.Adam(trainer.optimizers.schedules.CosineDecay(3e-3, UPDATES), global_clipnorm=0.5))
    model.build(np.zeros((1, 4), np.float32))
    before = float(mean_return(model.state.params, jax.random.key(1)))

    games = new_games(jax.random.key(0))
    for update in range(UPDATES):
        key = jax.random.fold_in(jax.random.key(2), update)
        games, states, targets = experience(model.state.params, games, key)
        loss = model.train_on_batch(states, targets)
        if (update + 1) % 50 == 0:
            mean = float(mean_return(model.state.params, jax.random.key(1)))
            print(f"After {update + 1} updates: loss {loss:.2f}, mean return {mean:.1f}")
    print({"return_before": before, "return_after": float(mean_return(model.state.params, jax.random.key(1)))})


if __name__ == "__main__":
    main()
