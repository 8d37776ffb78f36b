package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAcceleratorsAndFabricsAsTheyShouldBe(t *testing.T) {
	c, err := Load([]byte(header + `
accelerators:
- name: h200
  match: {pciClass: "0302", vendor: 10de, device: "2335"}
  capacity: {memory: 141Gi, compute: "100"}
  policy:
    memory: {default: 10Gi, min: 1Gi, max: 80Gi, step: 1Gi}
    compute: {default: "0", values: ["0", "10", "25", "50", "100"]}
  edits:
    environment: {CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: "${compute.percent}", PRICE: "$$5"}
    deviceNodes: [/dev/nvidiactl]
    mounts: [{hostPath: "/run/mps/${pciBusID}", containerPath: /tmp/mps, writable: true}]
  allow: {deviceNodes: ["/dev/nvidia-caps/*"]}
- {name: npu, match: {devicePaths: ["/dev/npu[0-9]*"]}, exclusive: true, capacity: {memory: 8Gi}}
- {name: free, match: {devicePaths: [/dev/free]}}
- {name: part, match: {devicePaths: [/dev/part]}, capacity: {compute: "1"}, policy: {compute: {default: 250m, min: 0, step: 50m}}}
fabrics:
- {name: rack1, nodeSelector: {example.com/rack: "1"}, attributes: {topology: 4x4}, edits: {environment: {NODE: "${node}"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Accelerators) != 4 || len(c.Fabrics) != 1 {
		t.Errorf("%+v", c)
	}
}

func TestAWrongAcceleratorIsRefusedByFieldValueAndRemedy(t *testing.T) {
	const match = `name: a, match: {devicePaths: [/dev/x]}`
	for _, tc := range []struct{ name, fields, want string }{
		{"nothing to match", `name: a, match: {}`, `accelerators[0].match: Required value: give pciClass, vendor and device, or devicePaths`},
		{"no hexadecimal", `name: a, match: {vendor: nvidia}`, `accelerators[0].match.vendor: Invalid value: "nvidia": must be four hexadecimal digits, such as 10de`},
		{"half a class", `name: a, match: {pciClass: "030"}`, `accelerators[0].match.pciClass: Invalid value: "030"`},
		{"not below /dev", `name: a, match: {devicePaths: [/etc/passwd]}`, `accelerators[0].match.devicePaths[0]: Invalid value: "/etc/passwd": must be a path below /dev or a pattern`},
		{"unknown field", match + `, memory: 1Gi`, `unknown field "accelerators[0].memory"`},
		{"no capacity", match + `, capacity: {memory: 0}`, `accelerators[0].capacity[memory]: Invalid value: "0": must be more than zero`},
		{"policy of nothing", match + `, policy: {memory: {default: 1, min: 0}}`, `accelerators[0].policy[memory]: Invalid value: "memory": is not a capacity: give it in capacity too`},
		{"policy of an exclusive device", match + `, exclusive: true, capacity: {memory: 1Gi}, policy: {memory: {default: 1, min: 0}}`, `accelerators[0].policy[memory]: Forbidden: an exclusive device is not requested in parts`},
		{"no default", match + `, capacity: {memory: 1Gi}, policy: {memory: {min: 0}}`, `accelerators[0].policy[memory].default: Required value`},
		{"neither values nor min", match + `, capacity: {memory: 1Gi}, policy: {memory: {default: 0}}`, `accelerators[0].policy[memory].min: Required value: give min, with max and step or without, or values`},
		{"both", match + `, capacity: {memory: 1Gi}, policy: {memory: {default: 0, min: 0, values: [0]}}`, `values: Forbidden: exclude min, max and step`},
		{"more than there is", match + `, capacity: {memory: 1Gi}, policy: {memory: {default: 0, min: 0, max: 2Gi}}`, `accelerators[0].policy[memory].max: Invalid value: "2Gi": must be between 0 and the capacity, 1Gi`},
		{"values out of order", match + `, capacity: {c: 10}, policy: {c: {default: 1, values: [2, 1]}}`, `accelerators[0].policy[c].values[1]: Invalid value: "1": must be more than the one before`},
		{"a default that is no value", match + `, capacity: {c: 10}, policy: {c: {default: 3, values: [1, 2]}}`, `accelerators[0].policy[c].default: Invalid value: "3": must be one of values`},
		{"a default off the step", match + `, capacity: {c: 10}, policy: {c: {default: 3, min: 0, step: 2}}`, `policy[c].default: Invalid value: "3": must be min, 0, plus a multiple of step, 2`},
		{"a max off the step, in fractions", match + `, capacity: {c: 1}, policy: {c: {default: 0, min: 0, max: 750m, step: 500m}}`, `policy[c].max: Invalid value: "750m": must be min, 0, plus a multiple of step, 500m`},
		{"no room for a step", match + `, capacity: {c: 10}, policy: {c: {default: 8, min: 8, step: 4}}`, `policy[c].step: Invalid value: "4": must be more than zero, and min plus step at most the capacity, 10`},
		{"step zero", match + `, capacity: {c: 10}, policy: {c: {default: 8, min: 8, step: 0}}`, `policy[c].step: Invalid value: "0"`},
		{"unknown variable", match + `, edits: {environment: {A: "${memroy}"}}, capacity: {memory: 1}`, `accelerators[0].edits.environment[A]: Invalid value: "${memroy}": has the variable "memroy"; there are device, memory, memory.Gi`},
		{"variable without braces", match + `, edits: {environment: {A: $memory}}`, `must have variables as ${name}, and $$ for a dollar sign`},
		{"a name of the driver's", match + `, edits: {environment: {DRA_SHARED_A: ""}}`, `names that begin with DRA_SHARED_ are reserved for the driver`},
		{"a variable that path-only devices have not", match + `, edits: {environment: {A: "${pciBusID}"}}`, `has the variable "pciBusID"`},
		{"two capacities with one variable", match + `, capacity: {memory: 1Gi, memory_bytes: 1}`, `accelerators[0].capacity[memory_bytes]: Invalid value: "memory_bytes": has the same variable in the environment as memory, MEMORY_BYTES`},
		{"a capacity named as a variable", match + `, capacity: {share: 1}`, `accelerators[0].capacity[share]: Invalid value: "share": is the name of a variable of every share`},
		{"half a byte", match + `, capacity: {memory: 1500m}`, `accelerators[0].capacity[memory]: Invalid value: "1500m": must be a whole number of bytes`},
		{"a mount over /dev", match + `, edits: {mounts: [{hostPath: /run/x, containerPath: /dev}]}`, `edits.mounts[0].containerPath: Forbidden: /dev is the runtime's`},
		{"two mounts in one place", match + `, edits: {mounts: [{hostPath: /run/x, containerPath: /x}, {hostPath: /run/y, containerPath: /x}]}`, `edits.mounts[1].containerPath: Duplicate value: "/x"`},
		{"a node twice", match + `, edits: {deviceNodes: [/dev/x, /dev/x]}`, `edits.deviceNodes[1]: Duplicate value: "/dev/x"`},
		{"a mount of everything", match + `, edits: {mounts: [{hostPath: /, containerPath: /x}]}`, `accelerators[0].edits.mounts[0].hostPath: Invalid value: "/": must be an absolute path without ..`},
		{"a mount upwards", match + `, edits: {mounts: [{hostPath: "/run/../${device}", containerPath: /x}]}`, `hostPath: Invalid value`},
		{"a node that is a file", match + `, edits: {deviceNodes: [/etc/x]}`, `edits.deviceNodes[0]: Invalid value: "/etc/x": must be the path of a device node below /dev`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := Load([]byte(header + "accelerators: [{" + tc.fields + "}]")); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
	for _, tc := range []struct{ fields, want string }{
		{`name: a`, `fabrics[0].nodeSelector: Required value: give the labels of the nodes that are on the fabric`},
		{`name: a, nodeSelector: {"x y": z}`, `fabrics[0].nodeSelector: Invalid value: "x y"`},
		{`name: a, nodeSelector: {x: z}, attributes: {kind: x}`, `fabrics[0].attributes[kind]: Forbidden: the driver sets it`},
		{`name: a, nodeSelector: {x: z}, edits: {environment: {A: "${pciBusID}"}}`, `has the variable "pciBusID"`},
	} {
		if _, err := Load([]byte(header + "fabrics: [{" + tc.fields + "}]")); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got  %v\nwant %s", err, tc.want)
		}
	}
}

func TestTextsAreExpandedByTheirVariables(t *testing.T) {
	e := Edits{Environment: map[string]string{"A": "0=${memory.Mi}M $${x}"}, DeviceNodes: []string{"/dev/${device}"}, Mounts: []Mount{{HostPath: "/run/${share}", ContainerPath: "/c", Writable: true}}}
	got, err := e.Expand(map[string]string{"memory.Mi": "512", "device": "d", "share": "s"})
	want := Edits{Environment: map[string]string{"A": "0=512M ${x}"}, DeviceNodes: []string{"/dev/d"}, Mounts: []Mount{{HostPath: "/run/s", ContainerPath: "/c", Writable: true}}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := e.Expand(map[string]string{"memory.Mi": "512", "share": "s"}); err == nil || !strings.Contains(err.Error(), "device") {
		t.Errorf("a variable without a value: %v", err)
	}
}
