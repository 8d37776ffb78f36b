package v1alpha1

import (
	stdjson "encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/json"
)

// Limits of all parameters, and of a NetworkAttachment.
const (
	maxParameters = 10 << 10 // bytes, what the API server accepts too
	maxAddresses  = 16
	maxRoutes     = 32
	maxName       = 15 // IFNAMSIZ - 1
	minMTU        = 68 // RFC 791
	minMTUIPv6    = 1280
	maxMTU        = 65535
)

// Parameters are what an opaque configuration for this driver holds: a
// *NetworkAttachment or an *AcceleratorShare.
type Parameters interface {
	// Validate checks what can be checked without knowing the device.
	Validate() field.ErrorList
	kind() string
}

// Decode reads the parameters of one opaque configuration, strictly: an
// unknown or repeated field is an error that names it.
func Decode(raw []byte) (Parameters, error) {
	if len(raw) > maxParameters {
		return nil, fmt.Errorf("parameters have %d bytes, want at most %d", len(raw), maxParameters)
	}
	// Version and kind first: what else may be there depends on them.
	var id struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &id); err != nil {
		return nil, fmt.Errorf("parameters are not an object of %s: %w", APIVersion, err)
	}
	if id.APIVersion != APIVersion {
		return nil, fmt.Errorf("apiVersion: %q: want %q", id.APIVersion, APIVersion)
	}
	switch id.Kind {
	case NetworkAttachmentKind:
		return decode(raw, &NetworkAttachment{})
	case AcceleratorShareKind:
		return decode(raw, &AcceleratorShare{})
	default:
		return nil, fmt.Errorf("kind: %q: want %q or %q", id.Kind, NetworkAttachmentKind, AcceleratorShareKind)
	}
}

// Check says what is wrong with the parameters of one opaque configuration, as
// far as it can be told without the device, and without what a class and a claim
// say beside each other.
func Check(raw []byte) error {
	parameters, err := Decode(raw)
	if err != nil {
		return err
	}
	if a, ok := parameters.(*NetworkAttachment); ok {
		a.Default()
	}
	return parameters.Validate().ToAggregate()
}

func decode(raw []byte, into Parameters) (Parameters, error) {
	strict, err := json.UnmarshalStrict(raw, into)
	var wrongType *stdjson.UnmarshalTypeError
	switch {
	case errors.As(err, &wrongType):
		err = fmt.Errorf("%s: got a %s, want a %s: does the value lack quotes, or have too many?", wrongType.Field, wrongType.Value, wrongType.Type)
	case err == nil && len(strict) > 0:
		err = fmt.Errorf("%w; there are the fields %s", joinStrict(strict), strings.Join(fields(into), ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", into.kind(), err)
	}
	return into, nil
}

// fields are the names of an object's fields, without version and kind.
func fields(of Parameters) (names []string) {
	t := reflect.TypeOf(of).Elem()
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if name != "apiVersion" && name != "kind" {
			names = append(names, name)
		}
	}
	return names
}

// DecodeAs is Decode for a device that takes parameters of one kind.
func DecodeAs[T Parameters](raw []byte) (T, error) {
	var want T
	p, err := Decode(raw)
	if err != nil {
		return want, err
	}
	got, ok := p.(T)
	if !ok {
		return want, fmt.Errorf("kind: %q: the device takes %q: name the requests that each is for, in the configuration's requests", p.kind(), want.kind())
	}
	return got, nil
}

func joinStrict(errs []error) error {
	texts := make([]string, len(errs))
	for i, err := range errs {
		texts[i] = err.Error()
	}
	return errors.New(strings.Join(texts, "; "))
}

// MergeNetworkAttachments lays what a claim says over what came before (a DeviceClass, an
// earlier configuration), field by field. Lists are replaced, not joined: an
// empty one takes away what was inherited.
func MergeNetworkAttachments(base, over *NetworkAttachment) *NetworkAttachment {
	m := &NetworkAttachment{APIVersion: APIVersion, Kind: NetworkAttachmentKind}
	for _, a := range []*NetworkAttachment{base, over} {
		if a == nil {
			continue
		}
		if a.InterfaceName != "" {
			m.InterfaceName = a.InterfaceName
		}
		if a.Mode != "" {
			m.Mode = a.Mode
		}
		if a.MTU != nil {
			m.MTU = a.MTU
		}
		if a.Addresses != nil {
			m.Addresses = a.Addresses
		}
		if a.Routes != nil {
			m.Routes = a.Routes
		}
		if a.Bandwidth != nil && a.Bandwidth.Burst != "" {
			m.Bandwidth = a.Bandwidth
		}
		m.AdminLink = m.AdminLink || a.AdminLink
	}
	return m
}

// Default fills in what nobody said.
func (a *NetworkAttachment) Default() {
	a.APIVersion, a.Kind = APIVersion, NetworkAttachmentKind
	if a.Mode == "" {
		a.Mode = ModePrivate
	}
	if a.Bandwidth == nil || a.Bandwidth.Burst == "" {
		a.Bandwidth = &Bandwidth{Burst: BurstGuaranteed}
	}
	// An empty list has taken away what was inherited; that is all it says.
	if len(a.Addresses) == 0 {
		a.Addresses = nil
	}
	if len(a.Routes) == 0 {
		a.Routes = nil
	}
}
