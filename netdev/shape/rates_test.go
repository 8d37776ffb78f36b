package shape

import "testing"

const mega = 1_000_000

func TestAShareIsAClassBelowTheLine(t *testing.T) {
	link := NICRates{Line: 10_000 * mega, Reserve: 100 * mega, MinShare: 10 * mega}
	for _, tc := range []struct {
		name    string
		rates   Rates
		ceil    uint64
		quantum uint32
		queue   uint32
	}{
		{"hard cap", Rates{Floor: 100 * mega, Ceil: 100 * mega}, 100 * mega, 10 * maxGSO, 250_000},
		{"a slow one: a whole segment's quantum, room for three", Rates{Floor: 10 * mega, Ceil: 10 * mega}, 10 * mega, maxGSO, 3 * maxGSO},
		{"a floor that may borrow", Rates{Floor: 20 * mega, Ceil: 10_000 * mega}, 10_000 * mega, 2 * maxGSO, 25_000_000},
		{"never above the line", Rates{Floor: 20 * mega, Ceil: 99_000 * mega}, 10_000 * mega, 2 * maxGSO, 25_000_000},
		{"quanta are bounded", Rates{Floor: 9_000 * mega, Ceil: 9_000 * mega}, 9_000 * mega, maxQuantum, 22_500_000},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := link.share(FirstMinor, tc.rates)
			if c.floor != tc.rates.Floor || c.ceil != tc.ceil || c.quantum != tc.quantum || c.queue != tc.queue {
				t.Errorf("got %+v", c)
			}
		})
	}
}

func TestWhatEveryNICHasFitsTheReserve(t *testing.T) {
	for _, link := range []NICRates{{Line: 10_000 * mega, Reserve: 100 * mega}, {Line: 1000, Reserve: 10}, {Line: 400_000 * mega, Reserve: 4000 * mega}} {
		var floors uint64
		for _, c := range link.base() {
			if c.minor != classRoot {
				floors += c.floor
			}
			if c.ceil > link.Line {
				t.Errorf("%+v: class %d may have %d", link, c.minor, c.ceil)
			}
		}
		if link.Reserve >= 32 && floors > link.Reserve {
			t.Errorf("%+v: floors of %d", link, floors)
		}
	}
}

func TestSegmentsAreShortOnSlowShares(t *testing.T) {
	for _, tc := range []struct {
		rate uint64
		mtu  int
		want int
	}{{10 * mega, 1500, 6000}, {10 * mega, 9000, 36000}, {100 * mega, 1500, 25000}, {1000 * mega, 1500, maxGSO}} {
		if got := SegmentBytes(tc.rate, tc.mtu); got != tc.want {
			t.Errorf("%d bit/s, mtu %d: %d, want %d", tc.rate, tc.mtu, got, tc.want)
		}
	}
}

func TestBurstsAreOneMillisecondInTheKernelsUnit(t *testing.T) {
	for _, rate := range []uint64{100 * mega, 10_000 * mega, 400_000 * mega} {
		if got, want := ticks(burstBytes(rate), rate), uint32(1e6/64); got != want {
			t.Errorf("%d bit/s: %d ticks, want %d", rate, got, want)
		}
	}
	if got := ticks(1<<40, 1); got != 1<<32-1 {
		t.Errorf("beyond the unit's range: %d", got)
	}
}

func TestIFBNamesFitAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	for _, nic := range []string{"nic0", "enp134s0f0np0", "enp134s0f0np1", "enp134s0f1np01"} {
		name := IFBName(nic)
		if len(name) > 15 || seen[name] {
			t.Errorf("%s: %s", nic, name)
		}
		seen[name] = true
	}
}
