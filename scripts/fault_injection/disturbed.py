"""The runs that faults and kills disturb: conversion, loading, paging, saved conversations, downloads."""

from __future__ import annotations

from contextlib import ExitStack

from fault_injection.injected import Injected, Run
from fault_injection.programs import Programs, Ran
from fault_injection.scene import DEMO, Scene, replace_tree


class Convert(Injected):
    """A checkpoint is converted at its first use."""

    def prepare(self) -> Run:
        source = self._scene.source
        return Run(self._scene.answer(source), None, (source, self.home), trusted=(source,))


class Load(Injected):
    """A store is loaded that was converted before."""

    def prepare(self) -> Run:
        source = self._scene.source
        under = (source, self.home)
        return Run(self._scene.answer(source), self._scene.converted, under, trusted=(source,))


class Paging(Injected):
    """The demo answers within a small budget.

    Args:
        scene: See there.
        uring: With io_uring, else with threads.
    """

    def __init__(self, scene: Scene, *, uring: bool) -> None:
        super().__init__(scene, "page-uring" if uring else "page-threads")
        self._uring = uring

    def prepare(self) -> Run:
        budget = self._scene.small_budget
        home = self._scene.work / "demo-home"
        arguments = [*self._scene.answer(DEMO), "--ram", budget]
        self._scene.undisturbed(arguments, home)
        return Run(arguments, home, (DEMO,), uring=self._uring)


class Conversations(Injected):
    """A saved conversation is continued."""

    def prepare(self) -> Run:
        from moechat.history.conversation import Conversation, Turn
        from moechat.history.session_database import Sessions

        home = self._scene.work / "with-conversation"
        replace_tree(self._scene.converted, home)
        made = Conversation()
        made.add(Turn("What is old?", "This is old.", model=str(self._scene.source), created=1.5))
        with Sessions(home / "state" / "sessions.db") as sessions:
            sessions.keep(made)
        arguments = [*self._scene.answer(self._scene.source, "And new?"), "--session", "1"]
        show = ("sessions", "show", "1")
        return Run(arguments, home, (home, self.home), check=show, repeats=False)

    def right(self, said: bytes) -> bool:
        """The old turn is there, and the turn of the plain run that came last."""
        return b"This is old." in said and b"And new?" in said


class Download(Injected):
    """A model is fetched from a hub on this machine, and converted meanwhile."""

    def open(self) -> None:
        from hub_checkpoint import write_hub_checkpoint
        from hub_server import REPOSITORY, Hub

        scene = self._scene
        checkpoint = scene.work / "hub-checkpoint"
        if not checkpoint.exists():
            write_hub_checkpoint(checkpoint)
        self._opened = ExitStack()
        self._hub = self._opened.enter_context(Hub().running())
        self._hub.add(REPOSITORY, checkpoint)
        self._repository = REPOSITORY
        self._programs = Programs(
            scene.work,
            scene.control,
            scene.shim,
            {
                "HF_ENDPOINT": self._hub.endpoint,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(scene.work / "hf"),
                "HF_TOKEN": "",
                "HF_HUB_DOWNLOAD_TIMEOUT": "2",
                "NO_PROXY": "127.0.0.1",
            },
        )
        self._opened.callback(self._programs.close)
        super().open()

    def close(self) -> None:
        super().close()
        self._opened.close()

    def prepare(self) -> Run:
        show = ("run", self._repository, "Hi", "--temperature", "0", "--max-tokens", "6")
        return Run(["download", self._repository], None, (self.home,), check=show)

    def start(self, run: Run) -> Ran:
        self._hub.reset()
        return self._programs.run(run.arguments, self.home)
