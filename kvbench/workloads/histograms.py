"""Lengths of the paper's two data sets, as counts: what stands in where the data sets themselves are absent.

The bars of Figure 11 of the PagedAttention paper (Kwon et al., SOSP 2023) convert to whole counts: 128 equal bins from
the shortest to the longest. For ShareGPT (first round of each conversation, OPT tokenizer, prompt and output at most
2048 tokens together: 79,731 pairs, means 161.31 and 337.99) the joint counts of the authors' artifact are known as
well; for Alpaca (52,002 pairs, means 19.31 and 58.45) only the two marginals are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbench.workloads.base import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of lengths in equal bins: bin i holds the integers of ``[first + i*width, first + (i+1)*width)``.

    The last bin holds its upper edge too, which is the longest length seen.
    """

    first: int
    width: float
    counts: IntArray

    @property
    def edges(self) -> FloatArray:
        """The bins' edges, one more than there are counts."""
        return np.arange(len(self.counts) + 1, dtype=np.float64) * self.width + self.first

    def draw(self, rng: np.random.Generator) -> IntArray:
        """As many lengths as were counted, in random order: each bin's count exactly, uniform inside the bin."""
        starts = np.ceil(self.edges).astype(np.int64)
        starts[-1] = int(self.edges[-1]) + 1
        bins = np.repeat(np.arange(len(self.counts)), self.counts)
        return rng.permutation(rng.integers(starts[bins], starts[bins + 1]))


@dataclass(frozen=True, slots=True)
class JointHistogram:
    """Counts of pairs: ``counts[i, j]`` have prompts in bin i, outputs in bin j.

    Bin i holds the integers of ``[edges[i], edges[i+1])``; no pair is longer than ``longest`` together.
    """

    edges: IntArray
    counts: IntArray
    longest: int

    def draw(self, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """As many prompts and outputs as pairs were counted, in random order.

        Each cell's count exactly, so both marginals and their dependence are kept; uniform inside the cell, drawn
        again while a pair is longer than the longest.
        """
        rows, columns = np.nonzero(self.counts)
        cells = rng.permutation(np.repeat(np.arange(len(rows)), self.counts[rows, columns]))
        low, high = self.edges[:-1], self.edges[1:]
        rows, columns = rows[cells], columns[cells]
        prompt = rng.integers(low[rows], high[rows])
        output = rng.integers(low[columns], high[columns])
        while len(again := np.flatnonzero(prompt + output > self.longest)):
            prompt[again] = rng.integers(low[rows[again]], high[rows[again]])
            output[again] = rng.integers(low[columns[again]], high[columns[again]])
        return prompt, output


def _counts(text: str) -> IntArray:
    counts = np.array(text.split(), dtype=np.int64)
    counts.setflags(write=False)
    return counts


SHAREGPT_PROMPT = Histogram(
    1,
    15.8359375,
    _counts("""
        21945 16255 7505 4716 3185 2536 1753 1493 1185 1008 922 830 609 683 659 521 518 424 412 414 445 397 432 432 364
        369 352 347 303 260 233 254 280 263 228 198 178 249 181 171 190 167 156 180 168 145 171 142 133 119 154 149 167
        141 107 76 116 111 126 95 94 104 124 121 122 109 119 129 127 95 124 112 99 89 80 63 69 64 70 52 64 69 54 53 69
        60 46 39 49 45 38 45 34 46 44 41 32 34 22 41 33 29 35 39 24 18 36 33 19 20 23 15 25 17 22 21 17 11 20 10 8 10 8
        4 12 3 1 5
    """),
)

SHAREGPT_OUTPUT = Histogram(
    1,
    15.6875,
    _counts("""
        3152 2786 2489 1960 2268 2441 2304 2378 2179 2000 1983 2177 2114 2265 2269 2289 2269 2335 2173 2030 1987 1963
        1740 1665 1636 1341 1248 1188 1030 980 1031 890 850 870 730 657 681 622 570 598 559 481 472 447 413 387 427 410
        1016 595 492 401 433 314 262 258 184 194 193 211 193 184 166 158 174 149 133 125 123 105 117 147 128 102 91 86
        97 84 93 84 77 62 44 41 46 45 27 35 35 27 34 34 41 35 31 18 28 30 12 19 15 15 12 13 12 9 12 8 11 9 3 5 5 9 6 8 8
        4 8 0 4 3 2 1 0 0 1 1
    """),
)

ALPACA_PROMPT = Histogram(
    6,
    3.921875,
    _counts("""
        2883 14295 13722 7974 4754 2703 1641 1057 667 479 337 271 130 176 149 125 90 72 68 65 44 41 36 35 29 12 21 20 11
        16 8 10 7 7 9 5 1 1 2 3 2 1 2 0 2 0 0 0 1 2 0 0 0 0 0 0 0 1 0 4 2 0 2 0 1 0 0 1 1 0 0 0 0 0 0 0 1 0 1 0 1 0 0 0
        0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1
    """),
)

ALPACA_OUTPUT = Histogram(
    1,
    11.4765625,
    _counts("""
        11390 8196 4453 3100 3441 3351 3696 3005 2795 1972 1679 1074 823 537 478 287 255 190 209 156 150 109 102 87 60
        61 37 56 26 25 17 23 21 20 14 11 10 13 6 4 2 5 3 6 6 4 2 6 4 5 1 2 3 0 2 1 1 3 1 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 0
        0 0 0 1 0 0 1 0 1 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1
    """),
)

SHAREGPT_JOINT = JointHistogram(
    _counts("""
        1 2 3 4 5 6 7 8 9 10 12 14 16 18 20 24 28 32 40 48 56 64 80 96 112 128 160 192 224 256 320 384 448 512
        640 768 896 1024 1280 1536 1792 2049
    """),
    _counts("""
        0 0 0 0 0 0 0 0 1 16 1 0 1 0 1 0 5 0 0 1 0 0 0 0 1 0 0 0 0 0 0 0 0 8 0 2 0 0 0 0 0
        0 14 6 3 1 2 0 1 2 717 19 5 3 8 13 40 21 80 36 6 3 1 7 5 6 1 10 2 5 2 2 0 0 4 4 3 1 0 0 2 0
        3 1 2 3 1 4 1 0 2 148 22 7 26 7 46 18 18 38 11 10 6 12 21 8 6 7 12 16 9 16 21 13 11 9 13 8 0 1 0 0 0
        0 7 5 1 0 2 3 0 3 47 11 6 2 3 35 12 22 35 19 13 11 19 16 17 17 16 18 25 40 26 15 10 10 16 14 11 3 2 0 0 0
        0 9 11 2 1 2 1 0 1 20 5 20 12 15 20 17 41 57 45 30 19 33 39 43 24 42 42 45 34 48 27 14 19 23 11 17 5 2 0 2 0
        1 2 4 3 0 6 2 3 3 20 12 7 3 9 19 26 19 43 50 19 20 57 47 65 50 64 66 61 72 109 57 30 22 15 21 17 7 1 0 0 0
        0 11 1 2 3 4 7 1 12 10 6 7 20 10 20 26 18 59 45 40 34 58 68 65 58 96 93 93 93 167 112 63 30 40 24 26 1 8 3 2 0
        1 8 1 0 1 1 2 2 3 11 7 13 10 11 18 31 35 46 46 29 30 161 141 93 116 141 108 131 130 237 141 67 29 44 27 15 5 3
        11 3 2
        0 6 1 0 0 1 1 1 5 4 4 11 4 10 25 31 10 39 41 32 33 101 79 102 72 120 106 136 103 251 142 72 65 51 24 28 5 7 2 0
        0
        1 19 4 3 0 1 4 4 6 8 17 11 7 20 41 37 23 59 49 43 72 154 158 200 183 244 262 331 281 525 427 246 112 125 91 71
        20 16 5 2 0
        0 15 1 1 3 0 7 0 0 9 13 12 7 20 26 33 31 66 60 41 62 134 154 175 159 226 251 283 314 585 418 228 132 150 87 71
        15 34 9 3 2
        0 8 0 6 2 8 2 7 5 0 5 9 4 5 35 26 17 48 55 40 49 93 125 139 109 210 212 249 286 545 434 234 153 172 103 91 37 19
        10 7 1
        0 8 1 1 2 1 1 1 1 4 1 5 10 7 15 14 25 41 30 26 29 80 111 108 114 155 166 236 257 441 339 216 142 193 107 71 30
        41 4 1 1
        0 4 2 0 1 5 2 1 1 2 4 3 3 7 20 14 18 43 33 22 43 74 92 110 85 173 158 169 201 373 325 217 149 187 103 56 42 27 6
        0 2
        0 19 3 1 0 1 0 1 1 4 18 11 26 12 29 37 30 56 46 40 74 115 147 132 134 249 261 298 321 708 482 372 256 363 202
        143 73 52 10 7 3
        0 17 21 1 1 0 0 3 3 7 8 9 11 12 58 27 19 61 33 60 42 77 112 95 68 199 188 245 231 452 441 261 196 329 248 133 71
        75 8 4 2
        1 8 3 0 1 2 1 3 5 10 10 1 10 8 18 15 26 43 50 30 38 84 80 49 60 122 150 148 163 312 296 214 175 223 152 155 78
        78 15 6 0
        0 21 3 2 2 1 2 2 2 4 10 15 15 19 22 61 37 71 76 59 47 134 101 103 120 184 262 202 237 524 459 323 257 368 260
        187 104 126 34 11 1
        0 10 0 10 0 4 0 1 1 8 2 5 22 8 23 28 22 73 47 57 37 73 90 64 80 150 169 182 190 376 323 265 214 264 194 168 82
        105 33 7 4
        0 12 6 3 2 2 3 2 1 2 5 3 4 2 19 20 33 48 52 59 50 58 69 61 65 124 129 146 147 260 245 189 143 215 144 136 66 72
        30 15 4
        0 7 9 4 1 1 2 1 1 3 7 12 9 5 16 22 15 42 18 29 21 54 54 72 45 83 98 129 111 221 188 160 105 191 122 95 62 70 19
        9 3
        0 10 11 5 2 1 2 2 7 14 12 10 8 7 31 34 30 41 38 51 27 101 85 90 60 140 130 172 148 353 340 233 187 245 214 182
        88 94 44 8 4
        0 9 5 4 4 7 1 6 2 11 14 3 15 8 19 12 20 48 30 28 57 74 48 70 57 114 125 105 146 260 233 178 149 231 148 142 53
        98 39 12 7
        0 8 4 9 0 1 3 4 9 4 2 5 8 2 14 23 23 30 22 17 24 43 65 56 37 80 78 89 87 202 175 133 109 153 108 102 45 63 29 11
        1
        0 6 2 1 0 2 1 2 0 7 4 1 0 4 6 10 14 11 26 15 12 38 43 42 40 65 46 74 65 155 145 127 76 148 83 71 43 65 30 12 1
        0 7 3 2 4 14 0 2 1 1 13 8 2 6 9 8 18 21 22 30 27 58 45 42 61 124 116 98 112 160 183 165 140 201 157 146 55 90 26
        13 3
        0 13 4 6 0 4 2 0 9 4 5 3 4 6 9 5 12 27 20 17 15 52 40 53 52 114 99 94 70 162 118 105 91 155 105 96 59 92 23 5 2
        0 9 2 4 2 1 1 0 1 2 1 4 0 1 5 8 9 9 8 23 13 39 34 28 31 72 68 63 79 126 101 102 59 120 104 70 41 55 18 7 2
        0 8 4 2 3 0 0 0 2 2 3 4 5 3 7 3 4 10 7 12 7 26 42 50 43 86 60 67 74 80 86 79 54 91 77 75 27 31 35 6 0
        0 13 17 3 2 2 6 1 1 14 6 1 3 3 8 7 16 19 21 14 20 24 36 47 44 121 79 96 90 172 151 112 100 151 115 126 63 51 35
        10 0
        0 13 5 4 5 0 1 3 2 4 7 2 5 2 7 6 6 20 15 17 12 38 42 35 58 103 70 76 86 146 155 99 125 159 89 118 59 68 28 6 0
        0 8 2 4 1 1 0 3 1 1 6 1 10 3 4 5 10 21 11 10 15 26 37 36 46 73 74 55 61 148 147 103 96 102 102 104 36 50 19 2 0
        0 14 4 8 10 0 0 3 1 3 1 1 1 5 6 4 6 11 8 13 8 14 35 33 27 77 47 40 61 76 88 74 76 97 70 67 27 52 15 2 0
        0 11 13 16 15 2 2 7 2 13 6 4 5 4 7 8 11 22 13 25 16 34 29 27 38 93 72 89 66 127 132 138 97 162 126 123 57 81 36
        0 0
        0 11 11 16 4 1 0 3 4 5 6 5 6 5 8 10 10 9 11 9 15 20 31 25 36 104 69 35 44 114 91 94 63 129 97 108 55 48 4 0 0
        0 5 1 14 4 4 1 2 3 1 7 1 4 1 11 6 14 5 12 11 15 13 23 25 26 67 62 38 68 94 67 77 58 72 74 70 30 47 0 0 0
        0 6 2 14 11 2 2 0 3 1 12 5 0 8 6 9 5 16 8 11 3 22 21 12 15 45 56 53 46 82 50 55 45 80 69 81 44 12 0 0 0
        0 11 1 20 3 2 11 1 4 6 5 4 3 2 5 10 11 25 22 15 16 36 37 33 37 93 83 97 59 105 108 107 104 161 140 112 17 0 0 0
        0
        0 14 3 28 2 1 5 2 0 11 2 4 1 2 9 9 12 12 4 14 3 21 18 24 35 71 60 45 52 64 49 48 45 77 20 0 0 0 0 0 0
        0 6 2 16 2 0 4 1 2 3 5 9 6 8 4 4 2 5 7 16 9 9 10 15 22 57 35 35 29 73 36 19 3 0 0 0 0 0 0 0 0
        0 5 5 5 1 0 8 4 0 1 5 5 1 1 3 3 8 18 7 9 2 8 9 7 11 20 11 11 1 0 0 0 0 0 0 0 0 0 0 0 0
    """).reshape(41, 41),
    longest=2048,
)
