"""Images of requests: fetched where that is allowed, counted against a budget, decoded off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from stemma.budgets import Budget
from stemma.config.settings import ImageSettings
from stemma.errors import InvalidRequest
from stemma.model.vision.prompt import ReadImage
from stemma.model.vision.reading import ImageReader
from stemma.model.vision.sources import ImageSource, bytes_of_data_url, is_data_url
from stemma.server.door.caller import caller
from stemma.workers import WorkerThreads

T = TypeVar("T")


class RequestImages:
    """Reads the images of one server's requests."""

    def __init__(
        self,
        reader: ImageReader,
        settings: ImageSettings,
        budget: Budget,
        threads: WorkerThreads,
        limit_s: float,
    ) -> None:
        """`budget` counts bytes of images, as they are read and as they are kept.

        `limit_s`: the longest time that reading one may take.
        """
        self.reader = reader
        self._max_number = settings.max_number
        self._budget, self._threads, self._limit_s = budget, threads, limit_s
        self._fetcher = None
        if settings.urls:
            from stemma.server.turn.fetching import ImageFetcher  # with httpx, a tenth of a second of a start

            self._fetcher = ImageFetcher(settings)

    async def read(self, sources: Sequence[ImageSource]) -> list[ReadImage]:
        """Return the images, in their order. What they take is held until the request is answered.

        Raises InvalidRequest naming the image, TookTooLong, RateLimited or Overloaded.
        """
        if len(sources) > self._max_number:
            raise InvalidRequest(
                f"the messages hold {len(sources)} images, and at most {self._max_number} are taken",
                param="messages",
            )
        return [await self._read(source) for source in sources]

    async def _read(self, source: ImageSource) -> ReadImage:
        known: dict[str, ReadImage] = caller().images
        found = known.get(source.given)
        if found is None:
            found = known[source.given] = await self._new(source)
        return found.named(source.name)

    async def _new(self, source: ImageSource) -> ReadImage:
        one, reader, name = caller(), self.reader, source.name
        data = await self._bytes(source)
        num_bytes = await self._in_thread(partial(reader.reading_bytes, data, name))
        if num_bytes > (most := self._budget.most(one.tenant)):
            raise InvalidRequest(
                f"{name} takes {num_bytes} bytes to read, and {most} are allowed (--image-memory); send a "
                "smaller one",
                param="messages",
            )
        with self._budget.taken(num_bytes, one.tenant):
            found = await self._in_thread(partial(reader.read_bytes, data, name, one.tenant))
        one.holding.take(self._budget, found.num_bytes, one.tenant)
        return found

    async def _bytes(self, source: ImageSource) -> bytes:
        url = source.given
        if is_data_url(url):
            work = partial(bytes_of_data_url, url, self.reader.limits, source.name)
            return await self._in_thread(work)
        if self._fetcher is None:
            raise InvalidRequest(
                f"{source.name}: this server fetches no images from URLs (--image-urls); send the image "
                "itself in a data: URL",
                param="messages",
            )
        return await self._fetcher.fetch(url, source.name)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._threads.run(
            work, limit_s=self._limit_s, what="reading an image", owner=caller().tenant
        )
