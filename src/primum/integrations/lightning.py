"""A callback for PyTorch Lightning (`import lightning`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT

from primum import Reducer, StepReport
from primum.integrations.attachment import Attachment


class PrimumCallback(Callback):
    """Reduces per-sample interference during `fit`: `Trainer(callbacks=[PrimumCallback()])`.

    Attaches when training starts, with the scaler of `precision="16-mixed"` if there is one, and
    detaches when it ends. The metrics of the last step are logged every `log_every_n_steps`, as
    `primum/harm_before` and so on, and the state is saved in Lightning's checkpoints. Works with
    automatic and manual optimization, accumulation and clipping.

    Args:
        settings: Keyword arguments of `primum.attach`, such as `radius`, `head` or `recipe`.

    Examples:
        >>> trainer = lightning.Trainer(callbacks=[PrimumCallback(radius=0.2)])
    """

    def __init__(self, **settings: Any) -> None:
        self._attachment = Attachment(settings)
        self._logged_at = -1

    @property
    def reducer(self) -> Reducer | None:
        """The `Reducer` during training, otherwise None."""
        return self._attachment.reducer

    @property
    def last(self) -> StepReport | None:
        """Report of the last step; kept after `fit`."""
        return self._attachment.last

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attachment.begin(pl_module, trainer.optimizers, scaler)
        rank_zero_info(self._attachment.headline)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Counts as Lightning does: steps, or batches under manual optimization.
        automatic = pl_module.automatic_optimization
        count = trainer.global_step if automatic else trainer.fit_loop.total_batch_idx + 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and count and count % every == 0 and count != self._logged_at:
            self._logged_at = count
            pl_module.log_dict(self._attachment.figures(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank_zero_info(self._attachment.end())

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._attachment.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":  # validate(ckpt_path=...) also loads the callbacks' states
            self._attachment.forget()

    def state_dict(self) -> dict[str, Any]:
        return self._attachment.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._attachment.load_state_dict(state_dict)
