"""The tasks behind a server: every change goes through here, to the disk and to the engine, in this order of safety.

A change is checked, prepared by the engine, written to the bundle folder, and only then answered from: what clients
were told is there after a restart, and what could not be written was never served. Processes that share a folder take
turns by its lock and look for others' changes first; between changes each looks at the folder a few times a second.
Without a folder, changes last until the server stops.

A task may be unloaded: it stays in the folder and is not served until it is loaded again or the server starts again.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vit_memory.atomic import write_atomic
from vit_memory.branch import Branch
from vit_memory.errors import FileError, UnknownTask, VitMemoryError
from vit_memory.files.bundle_lock import changing
from vit_memory.graph import TaskGraph
from vit_memory.serving.bundle_folder import BundleFolder
from vit_memory.serving.engine import Engine
from vit_memory.serving.problems import ProblemError
from vit_memory.serving.task_set import TaskSet
from vit_memory.task import Task

_LOOK_EVERY_S = 0.3
_TRY_AGAIN_AFTER_S = 10.0  # to serve a folder that could not be served and has not changed since
_UNLOADED = "unloaded.json"
log = logging.getLogger(__name__)

Stamps = tuple[object, object]  # of the folder's manifest, and of the file of unloaded tasks
Check = Callable[[str | None], None]  # gets the digest of what has the name now, None if nothing has; may refuse


@dataclass(frozen=True, slots=True, eq=False)
class _Edit:
    """What is held and what of it is unloaded after a change, and how the change is written to the folder."""

    held: TaskGraph
    unloaded: frozenset[str]
    write: Callable[[BundleFolder], None] | None = None
    by_others: bool = False  # it is on the disk already, and may be out of date: nothing of it is written


class TaskStore:
    """What a server holds and serves. Used on the engine's event loop."""

    def __init__(self, engine: Engine, folder: BundleFolder | None = None, run_folder: Path | None = None) -> None:
        """`run_folder` is where the processes of one server share which tasks are unloaded."""
        self._engine, self._folder, self._run_folder = engine, folder, run_folder
        self._held: TaskGraph = engine.task_set.tasks
        self._unloaded: frozenset[str] = frozenset()
        self._unloaded_file = None if run_folder is None else run_folder / _UNLOADED
        # Of what the tasks above were read from. A change since then is followed, and so is what is unloaded.
        self._seen: Stamps = (None if folder is None else folder.stamp_read, None)
        self._failed: tuple[Stamps | None, float] = (None, 0.0)  # what could not be served, and when
        self._turn = asyncio.Lock()

    @property
    def held(self) -> TaskGraph:
        """All tasks and branches, the unloaded ones included."""
        return self._held

    @property
    def unloaded(self) -> frozenset[str]:
        """The tasks that are held and not served."""
        return self._unloaded

    @property
    def persistent(self) -> bool:
        """Whether changes outlast the server. What workers share in their run folder goes when it stops."""
        return self._folder is not None and self._run_folder not in self._folder.folder.parents

    async def put(self, item: Task | Branch, check: Check = lambda _: None) -> TaskSet:
        """Hold and serve a task or branch, in the place of one that has its name."""
        is_branch = isinstance(item, Branch)

        def edit() -> _Edit:
            check(self.digest(item.name, branch=is_branch))
            held = _with(self._held, item)
            unloaded = self._unloaded if is_branch else self._unloaded - {item.name}
            return _Edit(held, unloaded, lambda folder: folder.put(item, held))

        return await self._change(edit)

    async def remove(self, name: str, *, branch: bool = False, check: Check = lambda _: None) -> TaskSet:
        """Drop a task or branch; GraphError while a task needs it."""
        tasks, branches = ([], [name]) if branch else ([name], [])

        def edit() -> _Edit:
            check(self.digest(name, branch=branch))
            held = self._held.remove(*tasks, branches=branches)
            return _Edit(held, self._unloaded - set(tasks), lambda folder: folder.remove(tasks, branches, held))

        return await self._change(edit)

    async def unload(self, name: str) -> TaskSet:
        """Serve a task no longer, and keep it. GraphError while a task that is served extends it."""

        def edit() -> _Edit:
            return _Edit(self._held, self._unloaded | {self._held[name].name})

        return await self._change(edit)

    async def load(self, name: str) -> TaskSet:
        """Serve a task that was unloaded, and the tasks that it extends."""

        def edit() -> _Edit:
            return _Edit(self._held, self._unloaded - {name, *self._held.ancestors(name)})

        return await self._change(edit)

    def digest(self, name: str, *, branch: bool = False) -> str | None:
        """The digest of a task or branch; None if there is none of that name."""
        if branch:
            return self._held.branch_digests.get(name)
        if name not in self._held:
            return None
        return self._engine.task_set.digests.get(name) or self._held[name].digest

    def branch(self, name: str) -> Branch:
        """A branch by name."""
        branches = self._held.branches
        if name not in branches:
            raise UnknownTask(f"no branch {name!r}. Attached: {', '.join(branches) or 'none'}.")
        return branches[name]

    async def hold(self, source: BundleFolder | TaskGraph) -> TaskSet:
        """Hold and serve what another folder holds, and follow it from now on; or these tasks, without a folder.

        All or nothing: if it cannot be served, what is held stays, and its folder is followed as before.
        """
        return await asyncio.shield(asyncio.create_task(self._hold(source)))

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Follow what others have changed in the folder since it was read, and whatever they change meanwhile."""
        await self._look()
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        """Follow the folder if it has changed. Whatever is wrong with it must not end the watch: it is others' work."""
        if self._folder is None:  # `hold` may give it one
            return
        stamps, now = await asyncio.to_thread(self._stamps, self._folder), time.monotonic()
        failed, failed_at = self._failed
        if stamps == self._seen or (stamps == failed and now < failed_at + _TRY_AGAIN_AFTER_S):
            return
        try:
            async with self._turn:
                await self._follow()
        except Exception as error:
            if failed != stamps:  # once for each state of the folder
                known = isinstance(error, VitMemoryError)
                log.error("the bundle folder changed, but cannot be served: %s", error, exc_info=not known)
            self._failed = stamps, time.monotonic()

    async def _change(self, edit: Callable[[], "_Edit"]) -> TaskSet:
        """Make a change, also if whoever asked for it is cancelled meanwhile: half a change would be worse."""
        return await asyncio.shield(asyncio.create_task(self._locked(edit)))

    async def _locked(self, edit: Callable[[], "_Edit"]) -> TaskSet:
        """Make a change: one at a time, of all processes, and after all others' changes.

        The edit runs beside the event loop: a new graph computes the digests of its branches, which may be large.
        """
        async with self._turn:
            if self._folder is None:
                return await self._serve(await asyncio.to_thread(edit))
            lock = changing(self._folder.folder)
            try:
                await asyncio.to_thread(lock.__enter__)
            except FileError as error:
                raise ProblemError(503, f"nothing was changed: {error}") from error
            try:
                if self._stamps(self._folder) != self._seen:
                    await self._follow_before_a_change()
                task_set = await self._serve(await asyncio.to_thread(edit))
                self._seen = self._stamps(self._folder)
                return task_set
            finally:
                lock.__exit__(None, None, None)

    async def _follow_before_a_change(self) -> None:
        try:
            await self._follow()
        except VitMemoryError as error:
            raise ProblemError(503, f"nothing was changed: the bundle folder cannot be read. {error}") from error

    async def _hold(self, source: BundleFolder | TaskGraph) -> TaskSet:
        async with self._turn:
            folder = None if isinstance(source, TaskGraph) else source
            names = self._stamps(folder)[1]
            held = source if isinstance(source, TaskGraph) else await asyncio.to_thread(source.read)
            task_set = await self._serve(_Edit(held, frozenset()))
            self._folder, self._seen = folder, (None if folder is None else folder.stamp_read, names)
            return task_set

    async def _follow(self) -> None:
        """Serve what the folder holds now."""
        assert self._folder is not None
        names = self._stamps(self._folder)[1]  # before reading: a change meanwhile is seen next time
        held = await asyncio.to_thread(self._folder.read)
        unloaded = self._unloaded if self._unloaded_file is None else _read_names(self._unloaded_file)
        # Others may have added a task that extends an unloaded one: that one is served again.
        needed = {parent for name in held if name not in unloaded for parent in held.ancestors(name)}
        await self._serve(_Edit(held, (unloaded & held.keys()) - needed, by_others=True))
        self._seen = self._folder.stamp_read, names

    async def _serve(self, edit: "_Edit") -> TaskSet:
        """Serve what an edit makes, after it was written to the disk; a failure changes nothing."""
        if edit.unloaded == self._unloaded and _same(edit.held, self._held):
            return self._engine.task_set
        served = edit.held.remove(*edit.unloaded) if edit.unloaded else edit.held

        def commit() -> None:
            wrote = False
            try:
                if self._folder is not None and edit.write is not None:
                    edit.write(self._folder)
                    wrote = True
                names = None if edit.by_others else self._unloaded_file
                if names is not None and edit.unloaded != _read_names(names):
                    write_atomic(names, [json.dumps(sorted(edit.unloaded)).encode()])
            except FileError as error:
                if not wrote:
                    raise ProblemError(503, f"nothing was changed: {error}") from error
                log.error("the change is made, but other workers do not learn which tasks are unloaded: %s", error)

        task_set = await self._engine.replace(
            lambda current: current.with_only(list(served.values()), list(served.branches.values())), commit
        )
        self._held, self._unloaded = edit.held, edit.unloaded
        return task_set

    def _stamps(self, folder: BundleFolder | None) -> Stamps:
        """Changes whenever another process changes something."""
        names = None
        if self._unloaded_file is not None:
            with suppress(OSError):
                names = self._unloaded_file.stat().st_mtime_ns
        return None if folder is None else folder.stamp(), names


def _same(a: TaskGraph, b: TaskGraph) -> bool:
    """Whether two graphs hold the same objects."""
    return _same_items(a, b) and _same_items(a.branches, b.branches)


def _same_items(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    return list(a) == list(b) and all(a[name] is b[name] for name in a)


def _with(graph: TaskGraph, item: Task | Branch) -> TaskGraph:
    """A graph with a task or branch in the place of the one that has its name, or at the end."""
    tasks, branches = dict(graph), dict(graph.branches)
    if isinstance(item, Task):
        tasks[item.name] = item
    else:
        branches[item.name] = item
    return TaskGraph(tasks.values(), branches.values())


def _read_names(path: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return frozenset()
