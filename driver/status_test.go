package driver

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

func attachedLink(pod string) linkState {
	return linkState{pod: attach.Pod{UID: pod, Namespace: "ns", Name: pod}, State: State{
		Attached: true, Interface: "net1", MAC: "02:00:00:00:00:01", MTU: 9000, Addresses: []string{"10.20.0.5/16"},
		Routes:   []Route{{Destination: "10.30.0.0/16", Gateway: "10.20.0.1"}},
		Enforced: Enforcement{Holds: true, Reason: "NetnsCookie", Message: "m", SendFloor: 100, SendCeil: 200, ReceiveFloor: 100, ReceiveCeil: 200},
	}}
}

var testShare = record.Share{Name: "x", Pool: "n1", Device: "nic0", ShareID: "11111111-2222-3333-4444-555555555555"}

func TestTheStatusOfAShareWithOneLink(t *testing.T) {
	row, err := statusRow("dra-shared.dev", shareState{Share: testShare, links: []linkState{attachedLink("p")}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := yaml.Marshal(row)
	if err != nil {
		t.Fatal(err)
	}
	const want = `conditions:
- lastTransitionTime: null
  message: attached to 1 pod(s)
  reason: Attached
  status: "True"
  type: Ready
- lastTransitionTime: null
  message: m
  reason: NetnsCookie
  status: "True"
  type: BandwidthEnforced
data:
  bandwidth:
    receive:
      ceiling: 200
      guaranteed: 100
    send:
      ceiling: 200
      guaranteed: 100
  cniVersion: 1.1.0
  interfaces:
  - mac: "02:00:00:00:00:01"
    mtu: 9000
    name: net1
  ips:
  - address: 10.20.0.5/16
    interface: 0
  routes:
  - dst: 10.30.0.0/16
    gw: 10.20.0.1
device: nic0
driver: dra-shared.dev
networkData:
  hardwareAddress: "02:00:00:00:00:01"
  interfaceName: net1
  ips:
  - 10.20.0.5/16
pool: n1
shareID: 11111111-2222-3333-4444-555555555555
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTheConditionReadySaysWhatIsMissing(t *testing.T) {
	down := attachedLink("q")
	down.Attached, down.Reason, down.Message = false, ReasonLinkChanged, "the link is down in the pod"
	for _, tc := range []struct {
		name    string
		links   []linkState
		failed  []string
		unnamed []attach.Pod
		want    string
	}{
		{"no container yet", nil, nil, nil, "False Prepared no container that names this claim"},
		{"no container ever", nil, nil, []attach.Pod{{Namespace: "ns", Name: "p"}}, "False NotReferenced pod ns/p has the claim, and none of its containers names it"},
		{"refused", nil, []string{"b", "a"}, nil, "False AttachFailed a; b"},
		{"refused for one, attached for another", []linkState{attachedLink("p")}, []string{"a"}, nil, "False AttachFailed a"},
		{"changed", []linkState{attachedLink("p"), down}, nil, nil, "False LinkChanged pod ns/q: the link is down in the pod"},
		{"well", []linkState{attachedLink("p"), attachedLink("q")}, nil, nil, "True Attached attached to 2 pod(s)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := readyCondition(shareState{links: tc.links, failed: tc.failed, unreferenced: tc.unnamed})
			if got := fmt.Sprintf("%s %s %s", c.Status, c.Reason, c.Message); !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

func TestOneLinkThatIsNotEnforcedIsTheClaims(t *testing.T) {
	bad := attachedLink("q")
	bad.Enforced = Enforcement{Reason: "NotClassified", Message: "why"}
	c := enforcedCondition([]linkState{attachedLink("p"), bad})
	if c.Status != "False" || c.Reason != "NotClassified" || c.Message != "why" {
		t.Errorf("%+v", c)
	}
}

// The API server takes at most 10 KiB of data and 16 addresses per device.
func TestTheStatusOfManyPodsIsBounded(t *testing.T) {
	var links []linkState
	for i := range 300 {
		l := attachedLink(fmt.Sprintf("%s-%03d", strings.Repeat("long", 60), i))
		for len(l.Addresses) < 16 {
			l.Addresses = append(l.Addresses, "fd00:1111:2222:3333:4444:5555:6666:7777/128")
		}
		links = append(links, l)
	}
	row, err := statusRow("d", shareState{Share: testShare, links: links, failed: []string{strings.Repeat("ü", 4000)}})
	if err != nil {
		t.Fatal(err)
	}
	if len(row.Data.Raw) > 10<<10 {
		t.Errorf("%d bytes of data", len(row.Data.Raw))
	}
	if row.NetworkData != nil {
		t.Error("network data of one pod among many")
	}
	if !strings.Contains(string(row.Data.Raw), `"pods":301,"attached":300,"failed":1`) || !strings.Contains(string(row.Data.Raw), `"truncated":true`) {
		t.Errorf("%.200s", row.Data.Raw)
	}
	for _, c := range row.Conditions {
		if len(c.Message) > maxMessage {
			t.Errorf("condition %s has a message of %d bytes", c.Type, len(c.Message))
		}
	}
}
