"""Algorithms 2 to 7 of the paper, line by line, in plain numpy with real branches.

Nothing is shared with the library and nothing is clever. Comments carry the paper's line numbers;
`OURS` marks the few places where the text cannot be followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.paper.literal import PaperSettings


def spike_guard(dg, Gdg, ema_dg, max_raise_dg=1.25, mom_dg=0.98):
    """Alg. 2. `ema_dg` is None at t = 1."""
    if ema_dg is None:  # 2
        ema_dg = dg + 1
    max_dg = max_raise_dg * ema_dg  # 3
    if dg > max_dg:  # 4
        Gdg = max_dg / dg * Gdg  # 5
        dg = max_dg  # 6
    ema_dg = mom_dg * ema_dg + (1 - mom_dg) * dg  # 8
    return dg, Gdg, ema_dg


def lanczos(Q, v, iterations):
    """Alg. 3, with the random vector given."""
    v = v / np.sqrt(v @ v)  # 3
    v_prev, beta = np.zeros_like(v), [0.0]  # 4
    alpha = []
    for i in range(1, iterations + 1):  # 5
        w = Q @ v  # 6
        alpha.append(v @ w)  # 7
        w = w - alpha[i - 1] * v - beta[i - 1] * v_prev  # 8
        beta.append(np.sqrt(w @ w))  # 9
        v_prev = v  # 10
        v = w / beta[i]  # 11
    T = np.diag(alpha)  # 13
    for i in range(1, iterations):
        T[i - 1, i] = T[i, i - 1] = beta[i]
    eigenvalues = np.linalg.eigvalsh(T)  # 14
    return eigenvalues[0], eigenvalues[-1]


def precondition(Q, kappa_bar, v=None, mom_k=0.98, max_raise_k=1.25, exact_up_to=256):
    """Alg. 4. `kappa_bar` is None at the first call, `v` starts Lanczos. Also gives lambda_max."""
    batch = len(Q)
    if batch <= exact_up_to:  # 2
        eigenvalues = np.linalg.eigvalsh(Q)
        lam_min, lam_max = eigenvalues[0], eigenvalues[-1]
    else:  # 3
        lam_min, lam_max = lanczos(Q, v, min(max(20, batch // 32), 128))
    lam_min = max(lam_min, np.finfo(Q.dtype).eps * lam_max)  # OURS: it may be 0 or negative
    kappa = lam_max / lam_min  # 4
    if kappa_bar is None:  # OURS: the paper does not say
        kappa_bar = kappa
    kappa_max = max_raise_k * kappa_bar  # 5
    if kappa > kappa_max:  # 6
        alpha = (lam_max - kappa_max * lam_min) / (kappa_max - 1.0)  # 7
        Q = Q + alpha * np.eye(batch)  # 8
        kappa = kappa_max  # 9
        lam_max = lam_max + alpha  # OURS: of the matrix the solver gets
    kappa_bar = mom_k * kappa_bar + (1 - mom_k) * kappa  # 11
    return Q, lam_max, kappa_bar


def approximate_projection(w, Q2, r, t=2.0):
    """Alg. 5."""
    w = np.clip(w, 0, t)  # 2
    return np.sqrt(r / max(r, w @ Q2 @ w)) * w  # 3


def pgd_warm_start(Q1, Q2, q, r, I_PGD, eta, t=2.0):
    """Alg. 6."""
    if I_PGD == 0:  # 2
        return np.zeros_like(q), np.zeros_like(q)
    w = np.zeros_like(q)  # 3
    y = (q > 0).astype(q.dtype)  # 4
    for _ in range(I_PGD):  # 5
        g = -Q1.T @ y  # 6
        w = approximate_projection(w - eta * g, Q2, r, t)  # 7
        y = (-Q1 @ w + q > 0).astype(q.dtype)  # 8
    return w, y


def chambolle_pock(
    Q1, Q2, q, r, lam_max, tol=1e-5, I_PGD=10, I_solver=50, t=2.0, safety=0.5, theta=0.9
):
    """Alg. 7. Also gives the number of iterations made, warm start included."""
    tau = safety / lam_max  # 2, 3
    sigma = safety / lam_max  # 4
    w, y = pgd_warm_start(Q1, Q2, q, r, I_PGD, tau, t)  # 5
    w_tilde = w  # 6
    made = I_PGD
    for _ in range(1, I_solver - I_PGD + 1):  # 7
        y = np.clip(y + sigma * (-Q1 @ w_tilde + q), 0, 1)  # 8
        w_new = w + tau * Q1.T @ y  # 9
        w_new = approximate_projection(w_new, Q2, r, t)  # 10
        w_tilde = w_new + theta * (w_new - w)  # 11
        made += 1
        update, w = np.abs(w_new - w).mean(), w_new
        if update <= tol:  # 12
            break
    return w, made  # OURS: the last projected point; what the paper prints is the one of line 9


def weighted_gram(x, g, tau_w, r):
    """Pseudocode 2, without the bias."""
    U, S, Vh = np.linalg.svd(tau_w, full_matrices=False)
    Q = np.zeros((len(x), len(x)))
    for k in range(min(r, len(S))):
        Q += S[k] * (x @ np.diag(Vh[k]) @ x.T) * (g @ np.diag(U[:, k]) @ g.T)
    return Q


@dataclass
class PaperByHand:
    """The recipe, step by step: App. B, the guards, Eq. 10 or Eq. 14, the solver."""

    settings: PaperSettings = field(default_factory=PaperSettings)
    ema_dg: float | None = None
    kappa_bar: float | None = None
    kappa_bar_2: float | None = None
    t: int = 0

    def step(self, head: MatrixFree, update: Update) -> np.ndarray:
        """Extra weights. The last column of the head's features belongs to the bias."""
        own, lr = self.settings, float(update.lr)
        x, g = head.features.numpy()[:, :-1], head.output_gradients.numpy()
        dtheta_w, dtheta_b = lr * update.step.numpy()[:, :-1], lr * update.step.numpy()[:, -1]
        Gdg = ((x @ dtheta_w.T) * g).sum(1) + g @ dtheta_b
        dg = (dtheta_w**2).sum() + (dtheta_b**2).sum()
        adaptive = isinstance(head.gain, torch.Tensor)
        if adaptive:
            kappa = head.gain.numpy()
            Q1, Q2 = (
                weighted_gram(x, g, kappa[:, :-1] ** p, own.gain_rank)
                + (g * kappa[:, -1] ** p) @ g.T
                for p in (1, 2)
            )
        else:
            Q1 = Q2 = (x @ x.T + np.ones((len(x), len(x)))) * (g @ g.T)

        generator = torch.Generator().manual_seed(self.t)  # OURS: any start will do

        def guarded(Q, kappa_bar):
            v = None
            if len(Q) > own.exact_spectrum_up_to:
                v = torch.randn(len(Q), generator=generator, dtype=torch.float64).numpy()
            return precondition(
                Q,
                kappa_bar,
                v,
                own.condition_momentum,
                own.condition_max_raise,
                own.exact_spectrum_up_to,
            )

        dg, Gdg, self.ema_dg = spike_guard(
            dg, Gdg, self.ema_dg, own.spike_max_raise, own.spike_momentum
        )
        Q1, lam_max, self.kappa_bar = guarded(Q1, self.kappa_bar)
        if adaptive:
            Q2, _, self.kappa_bar_2 = guarded(Q2, self.kappa_bar_2)
        else:
            Q2 = Q1
        self.t += 1
        w, _ = chambolle_pock(
            Q1,
            Q2,
            Gdg / lr,
            (own.radius / lr) ** 2 * dg,
            lam_max,
            own.tol,
            own.warm_up_iters,
            own.solver_iters,
            own.max_extra_weight,
            own.safety,
            own.relaxation,
        )
        return w
